"""Drafting with an independent small language model (2211.17192, 2302.01318)."""

from __future__ import annotations

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling
from speculator.decoding.session import Session
from speculator.drafters.base import Texts
from speculator.drafters.shapes import Chain, Shape
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
        self._vocab_size = target.vocab_size
        both = (model.tokenizer, target.tokenizer)
        if None not in both and both[0].get_vocab() != both[1].get_vocab():
            raise UserError(f"{model.name} does not share its tokenizer with {target.name}, so it can't draft for it")
        self._session = Session(model)

    def start(self, texts: Texts, hidden: Tensor, counts: Tensor) -> None:
        # The last token is fed again with the first draft, so a prompt of one token needs nothing here.
        self._session.prefill([text[:-1] for text in self._known(texts)])
        self._lengths, self._processed = [len(text) for text in texts], 0

    def propose(self, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        return self.shape.draft(self, pending, sampling, u, texts)

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        """Nothing to learn: the next draft reads the text again from where the last one began."""

    def first(self, pending: Tensor, texts: Texts) -> Tensor:
        # A chain leaves what it processed in the cache, one token less than it drafted; a tree's may lie elsewhere.
        grown = max(len(text) - old for text, old in zip(texts, self._lengths, strict=True))
        again = max(0, grown - self._processed) if isinstance(self.shape, Chain) else self.draft_length
        self._lengths, self._processed = [len(text) for text in texts], 1
        return self._logits(self._session.catch_up(self._known(texts), again)[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor, draft: Draft) -> Tensor:
        base = 1 + draft.tokens.shape[1] - tokens.shape[1]
        tree = None if draft.parents is None else draft
        cache = self._session.cache
        cache.grow(cache.longest + base + tokens.shape[1])
        self._processed += 1
        tokens = tokens.clamp(max=self.model.vocab_size - 1)
        return self._logits(self.model.extend(cache, tokens, tree, base))

    def _known(self, texts: Texts) -> Texts:
        """The texts with ids that a smaller vocabulary has not (padding of the target's) replaced by its last."""
        last = self.model.vocab_size - 1
        if last + 1 >= self._vocab_size:
            return texts
        return [[min(token, last) for token in text] for text in texts]

    def _logits(self, hidden: Tensor) -> Tensor:  # [B, f, D] -> [B, f, V] over the target's vocabulary
        logits = self.model.logits(hidden)[..., : self._vocab_size]
        return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)
