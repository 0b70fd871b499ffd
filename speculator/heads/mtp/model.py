"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the layer that GLM, Qwen and others ship as well.

Position t reads the target's state after its final norm and the token after it:

    z = eh_proj(cat(enorm(embed(x[t+1])), hnorm(h_t)))
    y = block(z)                                        a decoder layer of the target's own class
    logits = lm_head(norm(y))                           of x[t+2]; lm_head and embed are the target's, frozen

One layer drafts any number of tokens, as EAGLE does: step i reads norm(y) of step i-1 (y itself without
`recycle_normed`) and x[t+1+i] with the rope of t + i, and drafts x[t+2+i]. It attends to the keys of step 0 at
positions 0..t and to its own of steps 1..i, see `speculator.heads.eagle3.model`.

The training form, all steps of all positions of a text, comes first, then the drafting form.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from speculator.decoding.draft import gather_at
from speculator.heads.attention.base import attend
from speculator.heads.attention.joint_attention import (
    QueryRows,
    fused_dtype,
    joint_attention,
    positions_with_label,
    scores_of_a_head,
)
from speculator.heads.attention.levels import LevelCache, LevelSource
from speculator.heads.mtp.block import Attend, MTPLayer, Rotary, empty_decoder
from speculator.heads.mtp.config import MTPSpeculatorConfig
from speculator.heads.target_matrices import HeadOnTargetMatrices
from speculator.heads.unrolled import UnrolledHead
from speculator.target.packed import document_starts


class Joint:
    """The `Attend` of one step of training: to the text's keys of step 0, and to the row's own of later steps.

    Args:
        rows: the positions whose features are computed.
        step: number of the step, from 0 on.
        kept: keys and values of the text [B, S, K, d], and of the steps 1..step-1 [step - 1, R, K, d]; none at step 0.

    Attributes:
        made: keys and values [B, T, K, d] that this pass computed, for the `kept` of the next step.
    """

    made: tuple[Tensor, Tensor]

    def __init__(self, rows: QueryRows, step: int, kept: tuple[Tensor, ...]):
        self.rows, self.step, self.kept = rows, step, kept

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        size, narrow = query.shape[-1], value.shape[-1]
        value = nn.functional.pad(value, (0, size - narrow))  # latent attention has narrower values
        fused = fused_dtype(key, key.device.type)
        # Under autocast rope returns float32, and projections the lower precision.
        query, key, value = (x.to(fused or torch.promote_types(query.dtype, value.dtype)) for x in (query, key, value))
        self.rows.window, self.made = window, (key, value)
        # `joint_attention` multiplies by d ** -0.5; families with a longer rope have another factor.
        flat = query.flatten(0, 1) * (scaling * size**0.5)
        own = [x[:0].expand(0, len(flat), -1, -1) for x in (key[0, :, None], value[0, :, None])]
        text: tuple[Tensor, ...] = (key, value)
        if self.step:
            text, own = self.kept[:2], [torch.cat([a, b]) for a, b in zip(self.kept[2:], (key, value), strict=True)]
        out = joint_attention(self.rows, self.step, fused is not None, flat, *text, *own)
        return out.view(*query.shape)[..., :narrow].to(value.dtype)


class MTPSpeculator(HeadOnTargetMatrices, UnrolledHead):
    """An MTP layer; the embedding and the output matrix are the target's."""

    config_class = MTPSpeculatorConfig
    config: MTPSpeculatorConfig
    layers: Any  # one `MTPLayer`

    def __init__(self, config: MTPSpeculatorConfig):
        super().__init__(config)
        block: Any = config.block
        decoder: Any = empty_decoder(block)
        eps = getattr(decoder.config, "rms_norm_eps", 1e-6)
        self.layers = nn.ModuleList([MTPLayer(decoder.layers[0], type(decoder.norm), config.emb_dim, eps)])
        self.rotary = Rotary(decoder.config, type(decoder.rotary_emb))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):  # the family has initialised its block, and norms need nothing
            nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Routers add a bias to their float32 scores that decides which experts are chosen: it is never rounded.
        exact = [
            (module, name, buffer)
            for module in self.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype == torch.float32
        ]
        super()._apply(fn, recurse)
        for module, name, before in exact:
            module._buffers[name] = before.to(module.get_buffer(name).device)
        return self

    def weights_per_token(self, length: int) -> int:
        block: Any = self.config.block
        experts = sum(weight.numel() for weight in self.parameters() if weight.ndim == 3)
        count = block.get("n_routed_experts") or block.get("num_local_experts") or block.get("num_experts") or 1
        # Experts are tensors of three dimensions, of which a token uses `num_experts_per_tok` of `count`.
        layers = super().weights_per_token(length) + experts * (block.get("num_experts_per_tok") or 1) // count
        # The output matrix has no gradient: two products instead of three.
        return self.n_predict * (layers + 2 * self.config.output_size * self.config.emb_dim // 3)

    def drafting_source(self) -> LevelSource:
        return LevelSource(self, MTPForm(self))

    # --- what it shares with its target

    def bind(self, target: PreTrainedConfig, embedding: Tensor, output: nn.Linear) -> None:
        self.share(embedding, output)

    def output(self, index: int) -> nn.Linear:  # D -> V_d
        return self.target_output

    def draft_logits(self, features: Tensor) -> Tensor:  # [..., D] -> [..., V]
        return self.to_full_vocabulary(self.output_logits(features))

    # --- what both forms compute

    def run(
        self, embedded: Tensor, state: Tensor, positions: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:  # [B, T, D] twice
        """Run the layer; return what the output matrix reads, and the state that the next step reads.

        Args:
            embedded: [B, T, D] embeddings of the tokens after `positions`.
            state: [B, T, D] the target's hidden states, or the states of the step before.
            positions: [B, T] positions in the text.
            attend: the pass's attention, see `speculator.heads.mtp.block.Attend`.
        """
        y = self.layers[0](embedded, state, self.rotary(embedded, positions), positions, attend)
        feature = self.layers[0].norm(y)
        return feature, feature if self.config.recycle_normed else y

    @torch.no_grad()
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """Shapes [1, 1, K, d] of the keys and values of one position, found by running the layer once."""
        found: list[torch.Size] = []

        def note(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
            found.extend([key.shape, value.shape])
            return value[:, :, :1].expand(-1, -1, query.shape[2], -1)

        weight = self.layers[0].eh_proj.weight
        x = weight.new_zeros(1, 1, self.config.emb_dim)
        self.run(x, x, torch.zeros(1, 1, dtype=torch.long, device=x.device), note)
        return found[0], found[1]

    # --- training: all steps of all positions

    def unrolled(
        self,
        states: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1] step i of position t reads tokens[:, t + i]
        documents: Tensor | None = None,  # [B, S] document of each position, on the CPU; None: one document a row
        loss_mask: Tensor | None = None,  # [B, S] positions where features are needed, on the CPU; None: all
    ) -> list[Tensor]:  # N x [B, S, D]
        """See `UnrolledHead.unrolled`. The backward pass recomputes each step, from a few states that are kept.

        Features are 0 outside the loss mask from step 1 on.
        """
        length = states.shape[1]
        if documents is None:
            documents = torch.zeros(len(tokens), length, dtype=torch.long)
        positions, starts = torch.arange(length, device=states.device), document_starts(documents)
        heads = self.config.block["num_attention_heads"]  # type: ignore[index]
        limit = scores_of_a_head(states.device.type, heads)
        rows = QueryRows(positions_with_label(documents.numel(), None), starts, limit, None, states.device)

        embedded = self.embed(tokens[:, :length])
        if self.config.zero_first:
            embedded = embedded * (positions != rows.starts.view(starts.shape))[..., None]
        feature, state, *text = self._step(0, rows, embedded, states.to(embedded.dtype), positions[None])
        features = [feature]
        wanted = positions_with_label(documents.numel(), loss_mask)
        # From step 1 on only positions with a label: R rows as one sequence, [1, R, D].
        rows = QueryRows(wanted, starts, limit, None, states.device)
        state = state.flatten(0, 1)[None, rows.wanted]
        # No own keys yet, in the shape [0, R, K, d] to which each step adds one.
        own = [x[0, :0, None].expand(0, len(wanted), -1, -1) for x in text]
        for i in range(1, self.n_predict):
            # Step i of position t reads x[t+1+i] = tokens[:, t + i] with the rope of t + i.
            embedded = self.embed(tokens[rows.sequences, rows.positions + i])[None]
            feature, state, *made = self._step(i, rows, embedded, state, (rows.positions + i)[None], *text, *own)
            own = [torch.cat([before, new]) for before, new in zip(own, made, strict=True)]
            features.append(rows.whole(feature[0]).view(*documents.shape, -1))
        return features

    def _step(
        self, step: int, rows: QueryRows, embedded: Tensor, state: Tensor, positions: Tensor, *kept: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the layer, recomputed in the backward pass; return features, state, keys and values. See `Joint`."""

        def work(embedded: Tensor, state: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
            attend = Joint(rows, step, kept)
            return *self.run(embedded, state, positions, attend), *attend.made

        given = (embedded, state, *kept)
        return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    # --- export

    def probe(self) -> tuple[Tensor, ...]:
        """Return states [1, 4, D], tokens [1, 3 + N], and a matrix [V, D] in place of the target's two."""
        hidden, tokens = super().probe()
        return hidden, tokens, self.probe_matrix()

    @torch.no_grad()
    def logits(
        self,
        hidden: Tensor,  # [B, S, D]
        tokens: Tensor,  # [B, S+N-1]
        matrix: Tensor | None = None,  # [V, D] replaces the target's embedding and output matrix
    ) -> Tensor:  # [N, B, S, V]
        with nullcontext() if matrix is None else self.sharing(matrix, matrix):
            return super().logits(hidden, tokens)


# --- drafting


def written_first(cache: LevelCache, written: Tensor, seen: Callable[[int | None], Tensor]) -> Attend:
    """Return the attention of a pass that writes its keys and values, and attends to those that each token sees.

    Args:
        written: [B, T] positions of the cache that the pass writes.
        seen: returns a mask [B, T, M] of the cache's positions that each token sees, given the sliding window or None.
    """

    def attended(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        cache.write(0, key, value, written)
        mask = seen(window)
        keys, values = (x[0][:, :, : mask.shape[2]] for x in (cache.keys, cache.values))
        return attend(query, keys, values, mask, scaling)

    return attended


class MTPForm:
    """Computes for one more token what `MTPSpeculator.unrolled` computes for all positions."""

    def __init__(self, head: MTPSpeculator):
        self.head = head

    def cache(self, rows: int, capacity: int) -> LevelCache:
        """Create an empty cache for `rows` sequences of at most `capacity` tokens, drafts included."""
        key, value = self.head.shapes()
        return LevelCache(1, rows, key[2], capacity, key[3], self.head.layers[0].eh_proj.weight, value[3])

    @torch.no_grad()
    def read(
        self,
        cache: LevelCache,
        states: Tensor,  # [B, T, D] at the positions after those in the cache
        tokens: Tensor,  # [B, T] token after each
        counts: Tensor,  # [B] number of valid positions of each row, from the left
    ) -> tuple[Tensor, Tensor]:  # [B, T, D] twice
        """Append text to the cache without drafting from it; return what `MTPSpeculator.run` returns."""
        width = states.shape[1]
        positions = cache.lengths[:, None] + torch.arange(width, device=tokens.device)
        columns = cache.columns(width)

        def seen(window: int | None) -> Tensor:
            near = columns <= positions[..., None]
            return near if window is None else near & (columns > positions[..., None] - window)

        embedded = self.head.embed(tokens)
        if self.head.config.zero_first:
            embedded = embedded * (positions != 0)[..., None]
        made = self.head.run(embedded, states, positions, written_first(cache, positions, seen))
        cache.lengths += counts
        cache.longest += width
        return made

    @torch.no_grad()
    def first(self, cache: LevelCache, states: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        """Process accepted tokens (see `read`), the last of which is pending; return a draft's first logits."""
        made = self.read(cache, states, tokens, counts)
        cache.level = 0
        cache.seen = cache.lengths.new_zeros(len(states), 1, 0, dtype=torch.bool)
        # An idle row has count 0; its logits are not used.
        feature, cache.states = (gather_at(x, (counts - 1).clamp_min(0)[:, None]) for x in made)
        return self.head.draft_logits(feature)

    @torch.no_grad()
    def next(
        self,
        cache: LevelCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Process a level of a draft: write its keys and values, and return the logits of its children."""
        attention = written_first(cache, cache.begin_level(parents), cache.visible)
        state, position = gather_at(cache.states, parents), cache.rope_position.expand_as(tokens)
        feature, cache.states = self.head.run(self.head.embed(tokens), state, position, attention)
        return self.head.draft_logits(feature)
