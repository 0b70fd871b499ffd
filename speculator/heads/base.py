"""What every draft head is: a config, N steps over drafted tokens, and a vocabulary to draft from.

A head may draft from V_d of the V tokens only, its draft vocabulary: an output matrix then has V_d rows, and whoever
drafts sees -inf for all other tokens. What it reads may be any token.

There are two kinds: one goes from state to state (`speculator.heads.recurrent`), one has a memory of the text's keys
and values (`speculator.heads.eagle3.model`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_MOST_STEPS = 256
Loss = Callable[[list[Tensor], list[nn.Linear], Tensor | None], dict[str, Tensor]]
"""Of every step's features, [B, S, I] each, every step's output matrix, and `draft_tokens`: sums, and `objective`."""


class SpeculatorConfig(PreTrainedConfig):
    """Shape of a head, and where it comes from.

    Args:
        vocab_size: V, the target's `config.vocab_size`.
        emb_dim: D, the target's hidden size.
        inner_dim: I, the head's width; 0 means `emb_dim`.
        n_predict: N, the number of steps.
        draft_vocab_size: V_d, how many tokens it drafts from; None for all. Which ones: `Speculator.draft_tokens`.
        base_model_name_or_path: the target that the head was trained for.
        base_model_adapter: the PEFT adapter that the target had, if one.
        base_model_fingerprint: that target's `Target.fingerprint`.
        trained_length: the longest context, in tokens, that it was trained on.
        training_data: the sources that it was trained on.

    Raises:
        ValueError: `n_predict` not in 1..256, or `draft_vocab_size` not in 1..V.
    """

    attribute_map = {"hidden_size": "emb_dim"}  # noqa: RUF012 (transformers reads it so)

    vocab_size: int = 32000
    emb_dim: int = 4096
    inner_dim: int = 0
    n_predict: int = 3
    draft_vocab_size: int | None = None
    base_model_name_or_path: str | None = None
    base_model_adapter: str | None = None
    base_model_fingerprint: str | None = None
    trained_length: int | None = None
    training_data: list[str] | None = None

    def __post_init__(self, **kwargs):
        self.inner_dim = self.inner_dim or self.emb_dim
        if self.n_predict < 1:
            raise ValueError(f"n_predict must be at least 1, not {self.n_predict}")
        if self.n_predict > _MOST_STEPS:
            raise ValueError(f"n_predict must be at most {_MOST_STEPS}, not {self.n_predict}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}, the vocabulary")
        super().__post_init__(**kwargs)

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> SpeculatorConfig:
        """A head of a target's sizes, by its text config; `changes` are the rest, and go over them."""
        return cls(**{"vocab_size": target.vocab_size, "emb_dim": target.hidden_size, **changes})

    @property
    def output_size(self) -> int:
        """Rows of an output matrix: V_d, or V without a draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def own_options(cls) -> list[str]:
        """Fields of this architecture alone, which a run's config sets as `speculator.options`."""
        shared = {field.name for field in fields(SpeculatorConfig)}
        return [field.name for field in fields(cls) if field.name not in shared]

    @property
    def max_speculative_tokens(self) -> int | None:
        """Depth of the deepest draft that the head can make; None: no limit."""
        return self.n_predict

    def starts_from_target(self, requested: bool) -> bool:
        """Return whether a new head copies the target's matrices (`Speculator.initialise_from`).

        Args:
            requested: the user asked for it.
        """
        return requested

    def describe(self) -> str:
        """What it is beside its sizes, in a few words."""
        return f"{self.n_predict} steps"


class Speculator(PreTrainedModel, ABC):
    """A head that was trained to draft N tokens."""

    config_class = SpeculatorConfig
    base_model_prefix = "speculator"
    main_input_name = "hidden"

    draft_tokens: Tensor | None
    """[V_d] the token of each row of an output matrix, ascending; None where the rows are the whole vocabulary."""

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        # The first V_d until they are chosen: a checkpoint brings its own.
        size = config.draft_vocab_size
        self.register_buffer("draft_tokens", None if size is None else torch.arange(size))

    @property
    def n_predict(self) -> int:
        return self.config.n_predict

    @property
    def aux_layers(self) -> Sequence[int]:
        """The target's taps that it reads (`speculator.target.aux_layers`); none: it reads the state after the final norm."""
        return ()

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,  # [B, S, D], or [B, S, nD] the taps
        tokens: Tensor,  # [B, S+N-1] step i of position t reads tokens[:, t + i]
        measure: Loss,
        documents: Tensor | None = None,  # [B, S] the same number throughout a document, which is one piece
        loss_mask: Tensor | None = None,  # [B, S] bool: positions of which a step is wanted; None: all
    ) -> dict[str, Tensor]:
        """What a trainer wraps: what `measure` gives.

        The measuring happens in here, so that a data-parallel wrapper sees the losses as this module's output; the
        logits are left to it, which need not have all of them at once.
        """

    @abstractmethod
    def logits(
        self,
        hidden: Tensor,  # [B, S, D], or [B, S, nD] the taps
        tokens: Tensor,  # [B, S+N-1]
    ) -> Tensor:  # [N, B, S, V]
        """Every step's logits, teacher-forced, for tests and exporters: all of them in memory at once."""

    @abstractmethod
    def initialise_from(
        self,
        embedding: Tensor,  # [V, D] the target's
        output: Tensor,  # [V, D]
    ) -> None:
        """Let a fresh head begin with the target's own matrices."""

    def bind(
        self,
        target: PreTrainedConfig,
        embedding: Tensor,  # [V, D] the target's, as it is
    ) -> None:
        """Take from the target, by its text config, what the head leaves to it and needs to run.

        Raises:
            UserError: the target has no such thing.
        """

    def aliases(self) -> dict[str, str]:
        """Of tied weights: names that published checkpoints may also store a tensor under, to its name here."""
        return {}

    def draft_rows(
        self,
        output: Tensor,  # [V, ...]
    ) -> Tensor:  # [V_d, ...]
        """The rows of the draft vocabulary."""
        return output if self.draft_tokens is None else output[self.draft_tokens.to(output.device)]

    def to_full_vocabulary(
        self,
        logits: Tensor,  # [..., V_d] of an output matrix
    ) -> Tensor:  # [..., V]
        """The logits over the whole vocabulary: -inf outside the draft vocabulary, so that q is 0 there."""
        if self.draft_tokens is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_tokens, logits)

    def probe(self) -> tuple[Tensor, ...]:
        """Fixed inputs of `logits`: of an exported head they must give the same logits as of this one."""
        config = self.config
        hidden = torch.randn(1, 4, config.emb_dim, generator=torch.Generator().manual_seed(0))
        tokens = torch.arange(3 + config.n_predict, device=self.device)[None] * 7 % config.vocab_size
        return hidden.to(self.device, self.dtype), tokens
