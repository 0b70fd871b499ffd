"""Drafting with an independent small language model (2211.17192, 2302.01318)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculator.decoding.draft import Draft, take_at
from speculator.decoding.drafter import Drafter, LogitsSource, Sequences, Shape
from speculator.drafters.shapes import Chain, as_shape, grown
from speculator.errors import UserError
from speculator.target.cache.kv_cache import KVCache
from speculator.target.model import Target
from speculator.target.text import Encoded, source_of


class DraftModelDrafter(Drafter):
    """Drafts with a second model, which has its own KV cache and must share the target's tokenizer.

    An encoder-decoder model drafts for another one, with its own encoder.

    Args:
        target: the model that verifies. The draft model's logits are cut or padded to its vocabulary size.
        shape: form of the draft; a number n stands for a chain of n tokens.

    Raises:
        UserError: the tokenizers, encoders or devices differ, or the draft model has recurrent layers.
    """

    name = "model"

    def __init__(self, model: Target, target: Target, shape: Shape | int = 4):
        if model.recurrent:
            raise UserError(f"{model.name} has recurrent layers, so it can't be a draft model")
        both = (model.tokenizer, target.tokenizer)
        if None not in both and both[0].get_vocab() != both[1].get_vocab():
            raise UserError(f"{model.name} does not share its tokenizer with {target.name}, so it can't draft for it")
        if model.device != target.device:
            raise UserError(f"the draft model is on {model.device} and its target on {target.device}: load both on one")
        if model.start != target.start:
            raise UserError(f"{model.name} and {target.name} must both have an encoder, and the same start token")
        self.memory = DraftModelSource(model, target.vocab_size)
        self.reshape(as_shape(shape))


class DraftModelSource(LogitsSource):
    """Drafts with a second model, which keeps a KV cache of every row.

    Args:
        vocab_size: size of the target's vocabulary, over which logits are returned.
    """

    cache: KVCache
    _recent: Tensor  # [slots, reread] tokens before the pending one
    _tree: Draft  # what earlier levels have drafted
    _width: int  # tokens of the newest level

    def __init__(self, model: Target, vocab_size: int):
        self.model, self.capturable, self._vocab_size = model, model.capturable, vocab_size

    def reserve(self, shape: Shape) -> None:
        self._is_chain = isinstance(shape, Chain)
        self._spare = shape.offered + 2
        # A chain leaves in the cache all that it drafted but its last token; a tree's accepted path may lie elsewhere.
        # So the last `reread` tokens before the pending one are read again: 1, or the depth of a tree.
        self._reread = 1 if self._is_chain else shape.depth

    def open(self, cache: KVCache) -> DraftModelSource:
        opened, slots = super().open(cache), len(cache.lengths)
        opened.cache = self.model.cache(slots, cache.capacity + self._spare)
        opened._recent = torch.zeros(slots, self._reread, dtype=torch.long, device=self.model.device)
        return opened

    def grow(self, capacity: int) -> None:
        self.cache.grow(capacity + self._spare)

    def erase(self, row: int) -> None:
        super().erase(row)
        self.cache.erase(row)

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        self.cache.move(source, destination, longest)
        self._recent[list(destination)] = self._recent[list(source)]

    def prefill(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        """See `Memory`. The last tokens before the chunk, one or as many as a tree is deep, are read again with it."""
        device, reread = self.model.device, self._reread
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        # A prefix that another request left here ends with tokens whose keys may lie where a draft had put them.
        begins = [max(0, begin - reread) for begin in begins]
        new = [self._known(text[a:b]) for text, a, b in zip(sequences, begins, ends, strict=True)]
        width = max(map(len, new))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in new], device=device)
        self.cache.select(start, start + len(sequences), max(begins))
        self.cache.truncate(torch.tensor(begins))
        if any(isinstance(source_of(text), Encoded) for text in sequences):
            raise UserError("a draft model reads a source's tokens; model.generate passes on encoded states only")
        self.cache.read_sources(sequences)
        self.model.extend(self.cache, tokens, counts=[len(row) for row in new])
        self.cache.truncate(torch.tensor(ends))
        # Right-aligned: with 3 to reread and a text of 2 tokens, 0 a b.
        recent = [list(text[max(0, end - reread) : end]) for text, end in zip(sequences, ends, strict=True)]
        self._recent[start : start + len(sequences)] = torch.tensor([[0] * (reread - len(row)) + row for row in recent])

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        recent = self._recent[: len(counts)]
        # The newest `reread` tokens: with 2 of them, r0 r1 | t0 t1 t2 and a count of 2 give t0 t1, at columns 2 and 3.
        columns = counts[:, None] + torch.arange(self._reread, device=counts.device)
        recent.copy_(torch.cat([recent, tokens], 1).gather(1, columns))
        self.cache.commit(counts)

    @property
    def buffers(self) -> list[Tensor]:
        return [self._recent, self.cache.lengths]

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        rows, cache, reread = len(pending), self.cache, self._reread
        end = max(map(len, sequences)) - 1
        cache.select(0, rows, max(0, end - reread) if cache.bucket == 1 else end)
        back = cache.selected.clamp(max=reread)  # a text may be shorter
        # Left-aligned: recent tokens r0 r1 and the pending p become r0 r1 p, or r1 p p for a row with one token.
        columns = (torch.arange(reread + 1, device=pending.device) + reread - back[:, None]).clamp(max=reread)
        tokens = torch.cat([self._recent[:rows], pending[:, None]], 1).gather(1, columns)
        # Rows go back by the tokens that are read again, so that these overwrite their keys; then forward.
        cache.selected -= back
        hidden = self.model.extend(cache, tokens.clamp(max=self.model.vocab_size - 1))
        cache.selected += back
        cache.select(0, rows, end)
        self._tree, self._width = Draft.none(pending), 1  # after the pending token, which stays uncommitted
        return self._logits(take_at(hidden, back)[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        if self._is_chain:
            return self._run(tokens, None, level)
        # Positions of the draft that earlier levels have written; the first is the pending token's.
        base = 1 + self._tree.tokens.shape[1]
        self._tree, self._width = grown(self._tree, tokens, parents, self._width), tokens.shape[1]
        return self._run(tokens, self._tree, base)

    def _run(self, tokens: Tensor, tree: Draft | None, base: int) -> Tensor:  # [B, f] -> [B, f, V]
        """Return the logits after each token of a level, from verify position `base` on; `tree` None: a chain."""
        return self._logits(self.model.extend(self.cache, tokens.clamp(max=self.model.vocab_size - 1), tree, base))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Replace ids beyond the draft model's vocabulary, which only pad the target's, by its last id."""
        last = self.model.vocab_size - 1
        return list(tokens) if last + 1 >= self._vocab_size else [min(token, last) for token in tokens]

    def _logits(self, hidden: Tensor) -> Tensor:  # [B, f, D] -> [B, f, V] over the target's vocabulary
        logits = self.model.logits(hidden)[..., : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
