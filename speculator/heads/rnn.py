"""Heads that are a recurrence over drafted tokens (`mlp`, `lstm`).

A head of N steps starts from the target's hidden state h_t (after its final norm, which its lm_head reads). Step i
reads token x_{t+1+i} and drafts x_{t+2+i}; the target itself sampled the token of step 0 from h_t:

    state = start(h_t)
    state = advance(i, state, embedding(i)(x_{t+1+i}))
    logits_i = output(i)(features(i, state))

alpha = sqrt((1 - w^2) I/2) / w with w = 0.5^(0.5/N) weights a token's embedding relative to the state, so that h_t
contributes half of the state's variance at the last step. It depends on n_predict: a checkpoint is valid for its own N.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from speculator.decoding.draft import gather_at
from speculator.decoding.memory import Sequences
from speculator.errors import UserError
from speculator.heads.drafting import LastHiddenSource
from speculator.heads.unrolled import UnrolledConfig, UnrolledHead

_EPS = 1e-6
_NOISE = 0.3


class RNNConfig(UnrolledConfig):
    """Shape of a recurrent head.

    Args:
        tie_weights: share weights among the steps.
        scale_input: normalise the hidden state before the first step.
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


class RNNHead(UnrolledHead):
    """A head that drafts up to N tokens from a state of its own; training and drafting both call `advance`.

    The state is one tensor, so that a tree of drafts can gather it without knowing the architecture.
    """

    config_class = RNNConfig

    def __init__(self, config: RNNConfig):
        super().__init__(config)
        # Each step keeps w^2 of the variance that h_t contributes, so after N steps w^(2N) = 1/2 is left.
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.alpha = math.sqrt((1 - state_weight**2) * config.inner_dim / 2) / state_weight

    def start(
        self,
        hidden: Tensor,  # [..., D] the target's, after its final norm
    ) -> Tensor:  # [..., any]
        """Compute the state that step 0 reads: the hidden state, or rms(h) / sqrt(2) with `scale_input`."""
        if not self.config.scale_input:
            return hidden
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPS) / math.sqrt(2)

    def weights_per_token(self, length: int) -> int:
        matrices = ((*self.projections(i), self.output(i)) for i in range(self.n_predict))
        return sum(matrix.weight.numel() for step in matrices for matrix in step)

    @abstractmethod
    def projections(self, index: int) -> list[nn.Linear]:
        """Matrices by which step `index` multiplies the state it starts from."""

    @abstractmethod
    def embedding(self, index: int) -> nn.Embedding:  # V -> I
        """Embedding of the token that step `index` reads."""

    @abstractmethod
    def advance(
        self,
        index: int,
        state: Tensor,  # [..., any] from `start` for step 0, else from the step before
        token: Tensor,  # [..., I] embedding of the token after the one that `state` ends with
    ) -> Tensor:  # [..., any]
        """Compute the state after step `index`, which the next step starts from."""

    @abstractmethod
    def features(
        self,
        index: int,
        state: Tensor,  # [..., any] from `advance`
    ) -> Tensor:  # [..., I]
        """Select the part of a state that the output matrix reads."""

    @property
    @abstractmethod
    def entry(self) -> nn.Linear:  # D -> I
        """Matrix that projects the target's hidden state at step 0. `initialise_from` starts it near the identity."""

    def step(
        self,
        index: int,
        state: Tensor,  # [..., any]
        tokens: Tensor,  # [...]
    ) -> tuple[Tensor, Tensor]:  # [..., any], [..., V]
        """Run step `index` on `tokens`; return the next state and the logits of the token after each."""
        state = self.advance(index, state, self.embedding(index)(tokens))
        return state, self.to_full_vocabulary(self.output(index)(self.features(index, state)))

    def unrolled(
        self, states: Tensor, tokens: Tensor, documents: Tensor | None = None, loss_mask: Tensor | None = None
    ) -> list[Tensor]:
        """See `UnrolledHead`. Positions are independent, so `documents` and `loss_mask` are not used."""
        length = states.shape[1]
        tables = [self.embedding(i) for i in range(self.n_predict)]
        # Steps that share a table look it up together: every lookup has a gradient as large as the table.
        embedded = {table: table(tokens) for table in dict.fromkeys(tables)}
        state, features = self.start(states), []
        for i, table in enumerate(tables):
            # Step i of position t reads x[t+1+i], and `tokens` begins with x[1]: index t + i.
            state = self.advance(i, state, embedded[table][:, i : i + length])
            features.append(self.features(i, state))
        return features

    def drafting_source(self) -> RNNSource:
        return RNNSource(self)

    @torch.no_grad()
    def initialise_from(self, embedding: Tensor, output: Tensor) -> None:
        """Copy the target's matrices at the scale of the head's own initialisation.

        The first projection starts near the identity, so that step 0 sees the hidden state in the basis that the output
        matrix reads.
        """
        inner = self.config.inner_dim

        def rescaled(weight: Tensor) -> Tensor:
            return weight / weight.std() * inner**-0.5

        # The target's matrices have scales of their own; the head's have the variance 1/I, as it is initialised.
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(rescaled(embedding))
        for i in range(self.n_predict):
            self.output(i).weight.copy_(rescaled(self.draft_rows(output)))
        self.entry.weight.mul_(_NOISE).add_(torch.eye(inner))


class RNNSource(LastHiddenSource):
    """Drafts from the target's last hidden state, with one state per token of the newest level."""

    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        # [B, 1, ...]: the first level has one token, the pending one.
        state = self.head.start(self.hidden[: len(pending)])[:, None]
        self._states, logits = self.head.step(0, state, pending[:, None])
        return logits

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        # Each token continues the state of its parent: with the parents [0, 0, 1] the first two share a state.
        self._states, logits = self.head.step(level, gather_at(self._states, parents), tokens)
        return logits


class BiasedRMSNorm(nn.Module):
    """RMS norm with weight and bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias
