"""Drafting with an independent small language model (2211.17192, 2302.01318)."""

from __future__ import annotations

import torch
from torch import Tensor

from speculator.decoding.cache import RowCache
from speculator.decoding.draft import Draft, put, take_at
from speculator.decoding.sampling import RowSampling
from speculator.decoding.session import Session
from speculator.drafters.base import Texts
from speculator.drafters.shapes import Chain, Shape, grown
from speculator.errors import UserError
from speculator.target import Target


class ModelDrafter:
    """A causal LM with a cache of its own drafts. It must share the target's tokenizer.

    Args:
        model: the draft model, loaded as a target is.
        target: for whom it drafts: the tokenizers are compared, and a vocabulary of another size (padding) is cut or
            filled up.
        shape: what it drafts; a number is a chain of so many tokens.

    Raises:
        UserError: the tokenizers differ.
    """

    name = "model"

    def __init__(self, model: Target, target: Target, shape: Shape | int = 4):
        self.model = model
        self.shape = shape = Chain(shape) if isinstance(shape, int) else shape
        self.draft_length, self.nodes, self.rules = shape.depth, shape.nodes, shape.rules
        self.capturable = shape.capturable and model.capturable
        # A chain leaves in the cache all that it drafted but its last token; a tree's kept path may lie elsewhere. So
        # many tokens behind the pending one are processed again.
        self._again = 1 if isinstance(shape, Chain) else shape.depth
        self._recent: Tensor | None = None  # [B, again] the tokens before the pending one
        self._vocab_size = target.vocab_size
        both = (model.tokenizer, target.tokenizer)
        if None not in both and both[0].get_vocab() != both[1].get_vocab():
            raise UserError(f"{model.name} does not share its tokenizer with {target.name}, so it can't draft for it")
        self._session = Session(model)

    @property
    def buffers(self) -> list[Tensor | None]:
        return [self._recent, *self._session.cache.buffers]

    def start(self, texts: Texts, hidden: Tensor, counts: Tensor, cache: RowCache) -> None:
        # The last token is fed again with the first draft, so a prompt of one token needs nothing here.
        self._targets, room = cache, cache.capacity - max(map(len, texts)) + self.shape.offered + 2
        self._session.prefill([text[:-1] for text in self._known(texts)], room)
        self._session.cache.lengths.copy_(torch.tensor([len(text) for text in texts]))
        recent = [[0] * (self._again - len(text)) + list(text[-self._again :]) for text in texts]
        self._recent = put(torch.tensor(recent, device=counts.device), self._recent)

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        return self.shape.draft(self, pending, sampling, u, texts)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        assert self._recent is not None
        place = counts[:, None] + torch.arange(self._again, device=counts.device)
        self._recent.copy_(torch.cat([self._recent, tokens], 1).gather(1, place))
        self._session.cache.commit(counts)

    def first(self, pending: Tensor, texts: Texts) -> Tensor:
        assert self._recent is not None
        cache, again, end = self._session.cache, self._again, self._targets.longest
        back = cache.lengths.clamp(max=again)  # a text may be shorter
        place = (torch.arange(again + 1, device=pending.device) + again - back[:, None]).clamp(max=again)
        tokens = torch.cat([self._recent, pending[:, None]], 1).gather(1, place)
        cache.longest = max(0, end - again) if cache.exact else end
        cache.lengths -= back
        hidden = self.model.extend(cache, tokens.clamp(max=self.model.vocab_size - 1))
        cache.lengths += back
        cache.longest = end
        self._read, self._width = Draft.none(pending), 1
        # The pending token stays uncommitted: the draft's verify position 0.
        self._session.texts = [list(text[:-1]) for text in self._known(texts)]
        return self._logits(take_at(hidden, back)[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        tree, base = None, level
        if not isinstance(self.shape, Chain):
            base = 1 + self._read.tokens.shape[1]
            tree = self._read = grown(self._read, tokens, parents, self._width)
            self._width = tokens.shape[1]
        tokens = tokens.clamp(max=self.model.vocab_size - 1)
        return self._logits(self.model.extend(self._session.cache, tokens, tree, base))

    def _known(self, texts: Texts) -> Texts:
        """The texts with ids that a smaller vocabulary has not (padding of the target's) replaced by its last."""
        last = self.model.vocab_size - 1
        if last + 1 >= self._vocab_size:
            return texts
        return [[min(token, last) for token in text] for text in texts]

    def _logits(self, hidden: Tensor) -> Tensor:  # [B, f, D] -> [B, f, V] over the target's vocabulary
        logits = self.model.logits(hidden)[..., : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
