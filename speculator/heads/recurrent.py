"""Heads that are a recurrence over drafted tokens, with the vocabulary read off the state (`mlp`, `lstm`).

A head of N steps starts from the target's hidden state h_t (after its final norm, so what its lm_head reads). Step i
takes in token x_{t+1+i} and drafts x_{t+2+i}; the token of step 0 is the one that the target sampled from h_t:

    state = start(h_t)
    state = advance(i, state, embedding(i)(x_{t+1+i}))
    logits_i = output(i)(features(i, state))

alpha = sqrt((1 - w^2) I/2) / w with w = 0.5^(0.5/N) is the weight of a token's embedding beside the state: the state's
variance is then half h_t's at the last step. It depends on n_predict, so a checkpoint is only itself at its own N.

An architecture is a file with these, its config, and a line in `speculator.heads.ARCHITECTURES`. The state is one
tensor, so that whoever keeps it (a tree of drafts, a batch of rows) can gather and repeat it without knowing the head.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from speculator.errors import UserError
from speculator.heads.base import Loss, Speculator, SpeculatorConfig

_EPS = 1e-6
_NOISE = 0.3


class RecurrentConfig(SpeculatorConfig):
    """Shape of a recurrent head.

    Args:
        tie_weights: the steps share what they can of their weights.
        scale_input: normalise the hidden state before the first step.

    Raises:
        ValueError: as of any head, or tied weights with a single step.
    """

    tie_weights: bool = True
    scale_input: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.tie_weights and self.n_predict == 1:
            raise ValueError("tie_weights needs n_predict of at least 2: there is nothing to tie")

    def starts_from_target(self, requested: bool) -> bool:
        if requested and self.inner_dim != self.emb_dim:
            raise UserError("speculator.initialise target needs speculator.inner_dim 0, which takes the target's size")
        return requested

    def describe(self) -> str:
        tied, scaled = "" if self.tie_weights else "not ", "" if self.scale_input else "not "
        return f"{self.n_predict} heads, {tied}tied, input {scaled}scaled"


class RecurrentHead(Speculator):
    """A head that drafts up to N tokens from a state of its own; training and drafting both call `advance`."""

    config_class = RecurrentConfig

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.alpha = math.sqrt((1 - state_weight**2) * config.inner_dim / 2) / state_weight

    def start(
        self,
        hidden: Tensor,  # [..., D] the target's, after its final norm
    ) -> Tensor:  # [..., any]
        """The state that step 0 reads: the hidden state itself, or rms(h) / sqrt(2) with `scale_input`."""
        return (
            nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / math.sqrt(2)
            if self.config.scale_input
            else hidden
        )

    @abstractmethod
    def embedding(self, index: int) -> nn.Embedding:  # V -> I
        """The table that a step reads its token from."""

    @abstractmethod
    def advance(
        self,
        index: int,
        state: Tensor,  # [..., any] from `start` for step 0, from the step before after it
        token: Tensor,  # [..., I] the embedding of the token that came after the one that `state` ends with
    ) -> Tensor:  # [..., any]
        """The next state."""

    @abstractmethod
    def features(
        self,
        index: int,
        state: Tensor,  # [..., any] from `advance`
    ) -> Tensor:  # [..., I]
        """The part of a state that the output matrix reads."""

    @abstractmethod
    def output(self, index: int) -> nn.Linear:  # I -> V_d
        """The output matrix of a step; it has no bias."""

    @property
    @abstractmethod
    def entry(self) -> nn.Linear:  # D -> I
        """The matrix through which the hidden state comes in: near the identity, the state keeps the target's basis."""

    def step(
        self,
        index: int,
        state: Tensor,  # [..., any]
        tokens: Tensor,  # [...]
    ) -> tuple[Tensor, Tensor]:  # [..., any], [..., V]
        """One step: the next state, and the logits of the token after `tokens`."""
        state = self.advance(index, state, self.embedding(index)(tokens))
        return state, self.to_full_vocabulary(self.output(index)(self.features(index, state)))

    def forward(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
        measure: Loss,
        documents: Tensor | None = None,  # [B, S]
        loss_mask: Tensor | None = None,  # [B, S]
    ) -> dict[str, Tensor]:
        """See `Speculator`. No position reads another, so `documents` is unused; all are computed."""
        length = hidden.shape[1]
        tables = [self.embedding(i) for i in range(self.n_predict)]
        # Steps that share a table read it together: each reading has a gradient as large as the table.
        embedded = {table: table(tokens) for table in dict.fromkeys(tables)}
        state, features = self.start(hidden), []
        for i, table in enumerate(tables):
            state = self.advance(i, state, embedded[table][:, i : i + length])
            features.append(self.features(i, state))
        return measure(features, [self.output(i) for i in range(self.n_predict)], self.draft_tokens)

    def logits(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1] step i reads columns i..i+S-1
    ) -> Tensor:  # [N, B, S, V]
        state, every = self.start(hidden), []
        for i in range(self.n_predict):
            state, logits = self.step(i, state, tokens[:, i : i + hidden.shape[1]])
            every.append(logits)
        return torch.stack(every)

    @torch.no_grad()
    def initialise_from(self, embedding: Tensor, output: Tensor) -> None:
        """Take over the target's token geometry, at the scale that the head's own initialisation has.

        The first projection is near the identity, so that step 0 sees the hidden state in the basis that the output
        matrix reads: the head has the target's width.
        """
        inner = self.config.inner_dim

        def rescaled(weight: Tensor) -> Tensor:
            return weight / weight.std() * inner**-0.5

        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(rescaled(embedding))
        for i in range(self.n_predict):
            self.output(i).weight.copy_(rescaled(self.draft_rows(output)))
        self.entry.weight.mul_(_NOISE).add_(torch.eye(inner))


class BiasedRMSNorm(nn.Module):
    """RMS norm (no mean subtraction) with weight and bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias
