"""What every draft head is: a recurrence over drafted tokens, with the vocabulary read off its state.

A head of N steps starts from the target's hidden state h_t (after its final norm, so what its lm_head reads). Step i
takes in token x_{t+1+i} and drafts x_{t+2+i}; the token of step 0 is the one that the target sampled from h_t:

    state = start(h_t)
    state = advance(i, state, embedding(i)(x_{t+1+i}))
    logits_i = output(i)(features(i, state))

alpha = sqrt((1 - w^2) I/2) / w with w = 0.5^(0.5/N) is the weight of a token's embedding beside the state: the state's
variance is then half h_t's at the last step. It depends on n_predict, so a checkpoint is only itself at its own N.

A head may draft from V_d of the V tokens only, its draft vocabulary: an output matrix then has V_d rows, and whoever
drafts sees -inf for all other tokens. What it reads may be any token.

An architecture is a file with these, its config, and a line in `speculator.heads.ARCHITECTURES`. The state is one
tensor, so that whoever keeps it (a tree of drafts, a batch of rows) can gather and repeat it without knowing the head.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_EPS = 1e-6
_MOST_STEPS = 256


class SpeculatorConfig(PreTrainedConfig):
    """Shape of a head, and where it comes from.

    Args:
        vocab_size: V, the target's `config.vocab_size`.
        emb_dim: D, the target's hidden size.
        inner_dim: I, the head's width; 0 means `emb_dim`.
        n_predict: N, the number of steps.
        tie_weights: the steps share what they can of their weights.
        scale_input: normalise the hidden state before the first step.
        draft_vocab_size: V_d, how many tokens it drafts from; None for all. Which ones: `Speculator.draft_tokens`.
        base_model_name_or_path: the target that the head was trained for.
        base_model_fingerprint: that target's `Target.fingerprint`.
        trained_length: the longest context, in tokens, that it was trained on.
        training_data: the sources that it was trained on.

    Raises:
        ValueError: `n_predict` not in 1..256, tied weights with a single step, or `draft_vocab_size` not in 1..V.
    """

    attribute_map = {"hidden_size": "emb_dim"}  # noqa: RUF012 (transformers reads it so)

    vocab_size: int = 32000
    emb_dim: int = 4096
    inner_dim: int = 0
    n_predict: int = 3
    tie_weights: bool = True
    scale_input: bool = True
    draft_vocab_size: int | None = None
    base_model_name_or_path: str | None = None
    base_model_fingerprint: str | None = None
    trained_length: int | None = None
    training_data: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.inner_dim = self.inner_dim or self.emb_dim
        if self.n_predict < 1:
            raise ValueError(f"n_predict must be at least 1, not {self.n_predict}")
        if self.n_predict > _MOST_STEPS:
            raise ValueError(f"n_predict must be at most {_MOST_STEPS}, not {self.n_predict}")
        if self.tie_weights and self.n_predict == 1:
            raise ValueError("tie_weights needs n_predict of at least 2: there is nothing to tie")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}, the vocabulary")
        super().__post_init__(**kwargs)

    @property
    def output_size(self) -> int:
        """Rows of an output matrix: V_d, or V without a draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    def describe(self) -> str:
        """What it is beside its sizes, in a few words."""
        tied, scaled = "" if self.tie_weights else "not ", "" if self.scale_input else "not "
        return f"{self.n_predict} heads, {tied}tied, input {scaled}scaled"


class Speculator(PreTrainedModel, ABC):
    """A head that drafts up to N tokens. `step` is the one piece of maths: training and drafting both call it."""

    config_class = SpeculatorConfig
    base_model_prefix = "speculator"
    main_input_name = "hidden"

    draft_tokens: Tensor | None
    """[V_d] the token of each row of an output matrix, ascending; None where the rows are the whole vocabulary."""

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        state_weight = 0.5 ** (0.5 / config.n_predict)
        self.alpha = math.sqrt((1 - state_weight**2) * config.inner_dim / 2) / state_weight
        # The first V_d until they are chosen: a checkpoint brings its own.
        size = config.draft_vocab_size
        self.register_buffer("draft_tokens", None if size is None else torch.arange(size))

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

    def aliases(self) -> dict[str, str]:
        """Of tied weights: names that published checkpoints may also store a tensor under, to its name here."""
        return {}

    @property
    def n_predict(self) -> int:
        return self.config.n_predict

    def step(
        self,
        index: int,
        state: Tensor,  # [..., any]
        tokens: Tensor,  # [...]
    ) -> tuple[Tensor, Tensor]:  # [..., any], [..., V]
        """One step: the next state, and the logits of the token after `tokens`."""
        state = self.advance(index, state, self.embedding(index)(tokens))
        return state, self.spread(self.output(index)(self.features(index, state)))

    def spread(
        self,
        logits: Tensor,  # [..., V_d] of an output matrix
    ) -> Tensor:  # [..., V]
        """The logits over the whole vocabulary: -inf outside the draft vocabulary, so that q is 0 there."""
        if self.draft_tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_tokens, logits)

    def unroll(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1] step i reads columns i..i+S-1
    ) -> Iterator[Tensor]:  # N times [B, S, V]
        """Each step's logits in turn, teacher-forced."""
        length = hidden.shape[1]
        state = self.start(hidden)
        for i in range(self.n_predict):
            state, logits = self.step(i, state, tokens[:, i : i + length])
            yield logits

    def forward(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
        measure: Callable[[list[Tensor], list[nn.Linear], Tensor | None], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """What a trainer wraps: `measure` of every step's features, [B, S, I] each, output matrix, and `draft_tokens`.

        The measuring happens in here, so that a data-parallel wrapper sees the losses as this module's output; the
        logits are left to it, which need not have all of them at once.
        """
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
        tokens: Tensor,  # [B, S+N-1]
    ) -> Tensor:  # [N, B, S, V]
        """Every step's logits, for tests and exporters: all of them in memory at once."""
        return torch.stack(list(self.unroll(hidden, tokens)))

    def probe(self) -> tuple[Tensor, ...]:
        """Inputs of `logits`, always the same: two heads are one if their logits of it are."""
        config = self.config
        hidden = torch.randn(1, 4, config.emb_dim, generator=torch.Generator().manual_seed(0))
        tokens = torch.arange(3 + config.n_predict, device=self.device)[None] * 7 % config.vocab_size
        return hidden.to(self.device, self.dtype), tokens


class BiasedRMSNorm(nn.Module):
    """RMS norm (no mean subtraction) with weight and bias."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, _EPS) + self.bias
