"""Config of block drafters (`speculator.heads.dspark.model`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from speculator.heads.attention.base import AttentionConfig
from speculator.heads.training import IGNORE
from speculator.target.packed import document_starts


@dataclass
class AnchorTargets:
    """The training targets that lay out the blocks, in CPU tensors even if the batch is on a GPU.

    Attributes:
        anchors: [B, A] positions in each row, ascending; padded with 0 in rows with fewer possible anchors.
        starts: [B, A] first position of each anchor's document.
        labels: [B, A, G] the G tokens after each anchor; IGNORE where nothing is predicted.
    """

    anchors: Tensor
    starts: Tensor
    labels: Tensor


class DSparkSpeculatorConfig(AttentionConfig):
    """Shape of a `DSparkSpeculator`; see also `AttentionConfig`.

    Args:
        n_predict: G, tokens that one pass drafts.
        num_hidden_layers: number of layers.
        markov_rank: r, rank of the bias by the token before; 0 for none, as in DFlash.
        sample_from_anchor: the anchor's slot predicts the first token, as in DSpark; else the first mask's, as in
            DFlash, and a block has G + 1 slots.
        is_causal: of its block, a slot attends to itself and the slots before it only; else to all slots.
        sliding_window: number of positions up to its own that a slot attends to, in every layer; None for all.
        confidence_head: predict the chance that each drafted token is accepted.
        conv_group_size: channels that share a dynamic kernel of the convolutions of DFlash 2; 0 for no convolutions.
        selector_rank: rank of the selector of DFlash 2; 0 for no selector.
        selector_top_k: candidates of each slot among which the selector chooses.
        mask_token_id: a token that text never contains; -1 for the last one of the vocabulary.
        anchors: the most blocks that are trained in each row; every epoch draws other ones.
    """

    model_type = "dspark_speculator"

    n_predict: int = 7
    num_hidden_layers: int = 5
    markov_rank: int = 256
    sample_from_anchor: bool = True
    is_causal: bool = False
    sliding_window: int | None = None
    confidence_head: bool = True
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 16
    mask_token_id: int = -1
    anchors: int = 512
    target_options: ClassVar[tuple[str, ...]] = (*AttentionConfig.target_options, "mask_token_id")
    extensions: ClassVar[tuple[str, ...]] = ("anchors", "conv_group_size", "selector_rank", "selector_top_k")

    def __post_init__(self, **kwargs):
        least = {"num_hidden_layers": 1, "markov_rank": 0, "anchors": 1, "conv_group_size": 0, "selector_rank": 0}
        for name, bound in {**least, "selector_top_k": 1}.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if self.is_dflash2:
            self._check_dflash2()
        if self.mask_token_id == -1:
            self.mask_token_id = self.vocab_size - 1
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is not in 0..{self.vocab_size - 1}, the vocabulary")
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(f"sliding_window {self.sliding_window} is shorter than a block of {self.block_size}")
        super().__post_init__(**kwargs)

    def _check_dflash2(self) -> None:
        """Raise a ValueError unless the other fields have the values that a DFlash 2 head needs."""
        if self.conv_group_size and self.emb_dim % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} does not divide the hidden size {self.emb_dim}")
        if self.selector_rank and self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} is more than the vocabulary of {self.vocab_size}")
        needed = {"markov_rank": 0, "sample_from_anchor": False, "is_causal": False, "confidence_head": False}
        wrong = [
            f"{name} must be {json.dumps(value)}, not {json.dumps(getattr(self, name))}"
            for name, value in needed.items()
            if getattr(self, name) != value
        ]
        if self.draft_vocab_size is not None:
            wrong.append(f"draft_vocab_size must be 0 (all tokens), not {self.draft_vocab_size}")
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}: conv_group_size or selector_rank makes it a DFlash 2 head")

    @classmethod
    def shrunk(cls, options: Mapping[str, Any], emb_dim: int, vocab_size: int) -> dict[str, Any]:
        fitting = super().shrunk(options, emb_dim, vocab_size)
        if group := fitting.get("conv_group_size"):
            fitting["conv_group_size"] = math.gcd(group, emb_dim)
        if top_k := fitting.get("selector_top_k"):
            fitting["selector_top_k"] = min(top_k, vocab_size)
        return fitting

    @property
    def is_dflash2(self) -> bool:
        return bool(self.conv_group_size or self.selector_rank)

    @property
    def candidates(self) -> int:
        return self.selector_top_k if self.selector_rank else super().candidates

    @classmethod
    def method(cls, options: Mapping[str, Any]) -> str:
        """Return "dspark" if a part of DSpark is on, else "dflash", which DFlash 2 is too."""
        parts = ("markov_rank", "confidence_head", "sample_from_anchor")
        return "dspark" if any(options.get(name, getattr(cls, name)) for name in parts) else "dflash"

    @property
    def block_size(self) -> int:
        """Number of slots of a block, the anchor and the masks after it: G, or G + 1 without `sample_from_anchor`."""
        return self.n_predict + (not self.sample_from_anchor)

    @property
    def cached_values(self) -> int:
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @property
    def min_training_length(self) -> int:
        return self.n_predict + 2

    def slots_per_token(self, length: int) -> float:
        """Return the number of slots that a training row of `length` tokens has per token."""
        # 512 anchors with blocks of 7 in a row of 2,048 tokens: 1.75 slots per token.
        return min(self.anchors, length) * self.block_size / length

    def activation_bytes(self, length: int) -> int:  # measured on a CPU with bfloat16 products
        around = 72 if self.conv_group_size else 40
        layer = around * self.emb_dim + 12 * self.inner_dim + 30 * self.num_attention_heads * self.head_dim
        return round(self.slots_per_token(length) * self.num_hidden_layers * layer)

    def describe(self) -> str:
        parts = [
            f"{self.num_hidden_layers} layers",
            super().describe(),
            f"Markov rank {self.markov_rank}",
            "the anchor's slot drafts" if self.sample_from_anchor else "the anchor's slot drafts nothing",
            *(name for name in ("is_causal", "confidence_head") if getattr(self, name)),
            *([f"sliding window {self.sliding_window}"] if self.sliding_window else []),
            *([f"convolutions in groups of {self.conv_group_size}"] if self.conv_group_size else []),
            *([f"selector of rank {self.selector_rank} over {self.selector_top_k}"] if self.selector_rank else []),
            f"mask {self.mask_token_id}",
        ]
        return ", ".join(parts)

    def training_targets(
        self, input_ids: Tensor, document_ids: Tensor, loss_mask: Tensor, seeds: Sequence[int]
    ) -> dict[str, Any]:
        """Draw anchors a, by the row's seed; token k = 1..G of the block at a is x[a+k].

        Returns "labels" [B, A, G], IGNORE from the first token on that is not in the loss mask or belongs to another
        document, and "on_host", see `AnchorTargets`.
        """
        count, length = input_ids.shape
        learned = loss_mask.bool()
        # Last positions are first positions of the reversed row, counted from its end.
        end = length - 1 - document_starts(document_ids.flip(1)).flip(1)  # [B, L] last position of each document
        # An anchor a and its first label a + 1 must both be tokens that the target would write, in one document.
        possible = learned[:, :-1] & learned[:, 1:] & (document_ids[:, 1:] == document_ids[:, :-1])
        anchors = torch.zeros(count, min(self.anchors, length - 1), dtype=torch.long)
        drawn = torch.zeros_like(anchors, dtype=torch.bool)
        for row, seed in enumerate(seeds):
            positions = possible[row].nonzero()[:, 0]
            order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
            chosen = positions[order[: anchors.shape[1]]].sort().values
            anchors[row, : len(chosen)], drawn[row, : len(chosen)] = chosen, True
        # [B, A, G]: the positions a + 1 .. a + G that each block predicts.
        rows = torch.arange(count)[:, None, None]
        positions = anchors[:, :, None] + torch.arange(1, self.n_predict + 1)
        inside = (positions <= end[rows, anchors[:, :, None]]) & drawn[:, :, None]
        positions = positions.clamp_max(length - 1)  # a valid index, where `inside` is False
        # A draft ends at its first token without loss: 1 1 0 1 becomes 1 1 0 0.
        live = (inside & learned[rows, positions]).long().cumprod(-1).bool()
        labels = input_ids[rows, positions].masked_fill(~live, IGNORE)
        starts = document_starts(document_ids)[rows[..., 0], anchors]
        return {"labels": labels, "on_host": AnchorTargets(anchors, starts, labels)}
