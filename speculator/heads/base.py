"""The interface of a draft head: its config, its training form and its drafting form.

A head may draft from V_d of the V tokens only, its draft vocabulary: its output matrix then has V_d rows, and all other
tokens have logit -inf. It reads any token.

docs/contributing/add-a-head.md describes how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from speculator.decoding.drafter import LogitsSource
from speculator.errors import UserError
from speculator.heads.training import Metric, TokenLoss, TrainingBatch

_MAX_STEPS = 256


class SpeculatorConfig(PreTrainedConfig):
    """Shape and origin of a head.

    Args:
        vocab_size: V, the target's `config.vocab_size`.
        emb_dim: D, the target's hidden size.
        inner_dim: I, inner size of the head; 0 means `emb_dim`.
        n_predict: N, number of steps that training unrolls.
        draft_vocab_size: V_d, number of tokens it drafts from (`Speculator.draft_tokens`); None for all.
        base_model_name_or_path: the target that the head was trained for.
        base_model_adapter: PEFT adapter of that target.
        base_model_fingerprint: `Target.fingerprint` of that target.
        trained_length: longest context, in tokens, that it was trained on.
        training_data: sources that it was trained on.
    """

    attribute_map = {"hidden_size": "emb_dim"}  # noqa: RUF012 (as transformers declares it)

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
    target_options: ClassVar[tuple[str, ...]] = ()
    """Names of the fields whose values fit one target only, such as numbers of its layers."""
    extensions: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that may differ from those of the head in a warm start: they have no weights and some files
    can't say them, or the parts that they add change no draft at temperature 0 until they are trained."""
    ships_with_target: ClassVar[bool] = False
    """Targets may have such a head in their own folder, from which `speculator.initialise target` reads it."""

    def __post_init__(self, **kwargs):
        self.inner_dim = self.inner_dim or self.emb_dim
        if self.n_predict < 1:
            raise ValueError(f"n_predict must be at least 1, not {self.n_predict}")
        if self.n_predict > _MAX_STEPS:
            raise ValueError(f"n_predict must be at most {_MAX_STEPS}, not {self.n_predict}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}, the vocabulary")
        super().__post_init__(**kwargs)

    # --- declarations that a new architecture may override

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **changes: Any) -> SpeculatorConfig:
        """Build the config of a head for a target, given its text config; `changes` override the target's sizes."""
        return cls(**{"vocab_size": target.vocab_size, "emb_dim": target.hidden_size, **changes})

    @classmethod
    def shrunk(cls, options: Mapping[str, Any], emb_dim: int, vocab_size: int) -> dict[str, Any]:
        """Return a head's options as they fit a small target with these sizes; `target_options` are left out."""
        return {name: value for name, value in options.items() if name not in cls.target_options}

    @property
    def max_speculative_tokens(self) -> int | None:
        """Depth of the deepest draft that the head can make; None: no limit."""
        return self.n_predict

    @property
    def candidates(self) -> int:
        """How many different tokens the head can draft after one token: the most children that a tree may give it."""
        return self.output_size

    @property
    def cached_values(self) -> int:
        """Number of values (of keys, values and states) that the head's memory keeps per token of a row."""
        return 0

    def activation_bytes(self, length: int) -> int:
        """Estimate the bytes per token that training on rows of `length` tokens keeps for the backward pass."""
        return 24 * self.n_predict * self.inner_dim  # calibrated on a GPU

    @property
    def min_training_length(self) -> int:
        """Fewest tokens of a training row; shorter rows are padded."""
        return 2

    def training_targets(
        self,
        input_ids: Tensor,  # [B, L]
        document_ids: Tensor,  # [B, L] the same number throughout a document
        loss_mask: Tensor,  # [B, L] 1 for tokens that the target would generate
        seeds: Sequence[int],  # B random seeds, one per row, other ones in every epoch
    ) -> dict[str, Any]:
        """Choose the training positions of a batch of rows.

        Returns "labels", token ids in the shape that `forward` expects, IGNORE where there is nothing to predict; the
        number of other labels normalises the loss. Further entries of the dict reach `forward` in
        `TrainingBatch.targets`: tensors are moved to the device, other objects stay as they are.
        """
        raise NotImplementedError

    @classmethod
    def method(cls, options: Mapping[str, Any]) -> str:
        """Return the method's name, such as "dflash", for a head's options; recipes of a method share one loss."""
        return cls.model_type

    def starts_from_target(self, requested: bool) -> bool:
        """Return whether a new head copies the target's matrices; override it together with `initialise_from`.

        Args:
            requested: the user asked for it. Raises a UserError if the head can't.
        """
        if requested:
            raise UserError(f"speculator.initialise target: a {self.model_type} copies nothing from the target")
        return False

    def describe(self) -> str:
        """Describe the head's shape, other than its sizes, in a few words."""
        return f"{self.n_predict} steps"

    # --- what follows from them

    @classmethod
    def own_options(cls) -> list[str]:
        """Return the fields of this architecture alone, which a run's config sets as `speculator.options`."""
        shared = {field.name for field in fields(SpeculatorConfig)}
        return [field.name for field in fields(cls) if field.name not in shared]

    @property
    def output_size(self) -> int:
        """Rows of an output matrix: V_d, or V without a draft vocabulary."""
        return self.draft_vocab_size or self.vocab_size


class Speculator(PreTrainedModel, ABC):
    """A draft head.

    Attributes:
        draft_tokens: [V_d] token of each row of an output matrix, ascending; None: the whole vocabulary.
    """

    config_class = SpeculatorConfig
    config: SpeculatorConfig
    base_model_prefix = "speculator"
    main_input_name = "hidden"
    draft_tokens: Tensor | None

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        size = config.draft_vocab_size
        # Placeholders: training fills in the tokens that it chose, and loading those of the checkpoint.
        self.register_buffer("draft_tokens", None if size is None else torch.arange(size))

    # --- what every architecture implements

    @abstractmethod
    def forward(self, batch: TrainingBatch, loss: TokenLoss) -> dict[str, Metric]:
        """Return named (sum, count) pairs of a training batch.

        "objective" is the weighted loss summed over the labels of all N draft positions, and the number of labels, both
        scalars; the trainer minimises N times their ratio. "loss", "accuracy", "prefix_accuracy" and any other metric
        but "rows" (see `step_metrics`) have one entry per draft position. The head computes its losses here because a
        data-parallel wrapper sees this module's output only.
        """

    @abstractmethod
    def drafting_source(self) -> LogitsSource:
        """Return the head's drafting form."""

    @abstractmethod
    def logits(self, *inputs: Any, **options: Any) -> Tensor:
        """Compute teacher-forced logits; they take `probe`'s inputs, to compare an exported head with this one."""

    def probe(self) -> tuple[Tensor, ...]:
        """Return fixed inputs of `logits`: hidden states [1, 4, D] and tokens [1, 3 + N]."""
        # S = 4 positions: the last of N steps at the last position reads token S + N - 2, the last of S + N - 1.
        config = self.config
        hidden = torch.randn(1, 4, config.emb_dim, generator=torch.Generator().manual_seed(0), device="cpu")
        tokens = torch.arange(3 + config.n_predict, device=self.device)[None] * 7 % config.vocab_size
        return hidden.to(self.device, self.dtype), tokens

    def probe_matrix(self) -> Tensor:  # [V, D]
        """Return a fixed matrix for `probe` in place of the target's embedding or output matrix."""
        # Row i is a view of V + D - 1 random numbers, from i on: a whole random matrix may take gigabytes.
        size = self.config.vocab_size + self.config.emb_dim - 1
        noise = torch.randn(size, generator=torch.Generator().manual_seed(1), device="cpu")
        return noise.to(self.device, self.dtype).unfold(0, self.config.emb_dim, 1)

    # --- what some architectures override

    @property
    def aux_layers(self) -> Sequence[int]:
        """Target layers whose hidden states the head reads; empty: the final hidden state."""
        return ()

    def initialise_from(
        self,
        embedding: Tensor,  # [V, D] the target's
        output: Tensor,  # [V, D] the target's
    ) -> None:
        """Copy the target's matrices into a new head."""

    def bind(
        self,
        target: PreTrainedConfig,
        embedding: Tensor,  # [V, D] the target's, not copied
        output: nn.Linear,  # D -> V, the target's
    ) -> None:
        """Take what the head needs from the target to run, given its text config."""

    def check_width(
        self,
        embedding: Tensor,  # [V, D] the target's
    ) -> None:
        width = embedding.shape[1]
        if width != self.config.emb_dim:
            raise UserError(f"the head reads embeddings of size {self.config.emb_dim}, the target has {width}")

    def aliases(self) -> dict[str, str]:
        """Return {name in a checkpoint: name here} for the tied tensors that published checkpoints store repeatedly."""
        return {}

    # --- what they share

    @property
    def n_predict(self) -> int:
        return self.config.n_predict

    def token_matrices(self) -> list[Tensor]:
        """Return the head's own matrices with a row per token (V or V_d rows): embeddings and output matrices."""
        return [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]

    def weights_per_token(self, length: int) -> int:
        """Return the number of weights that training on rows of `length` tokens multiplies with each token."""
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, nn.Linear))

    def draft_rows(
        self,
        output: Tensor,  # [V, ...]
    ) -> Tensor:  # [V_d, ...]
        return output if self.draft_tokens is None else output[self.draft_tokens.to(output.device)]

    def to_full_vocabulary(
        self,
        logits: Tensor,  # [..., V_d]
    ) -> Tensor:  # [..., V]
        """Spread logits over the whole vocabulary: -inf outside the draft vocabulary, so that q is 0 there."""
        if self.draft_tokens is None:
            return logits
        # [..., V_d] -> [..., V]: with the draft vocabulary [2, 5] of 8 tokens, the logits a b become - - a - - b - -.
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.draft_tokens, logits)
