"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the layer that GLM, Qwen and others ship as well.

Position t reads the target's state after its final norm and the token after it:

    z = eh_proj(cat(enorm(embed(x[t+1])), hnorm(h_t)))
    y = block(z)                                        a decoder layer of the target's own class
    logits = lm_head(norm(y))                           of x[t+2]; lm_head and embed are the target's, frozen

One layer drafts any number of tokens, as EAGLE does: step i reads norm(y) of step i-1 (y itself without
`recycle_normed`) and x[t+1+i] with the rope of t + i, and drafts x[t+2+i]. It attends to the keys of step 0 at
positions 0..t and to its own of steps 1..i, see `speculator.heads.eagle3.model`.

Of a chain of layers, layer i runs at every position: it reads norm(y) of layer i-1 at t and x[t+1+i], and attends to
its own keys at positions 0..t. For two layers and a text x0 x1 x2 x3, of which x3 is pending:

    position       0     1     2
    layer 0 reads  x1    x2    x3       drafts d1 at 2
    layer 1 reads  x2    x3    d1       drafts d2 at 2

The training form, all steps of all positions of a text, comes first, then the drafting form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from typing_extensions import Self

from speculator.decoding.draft import gather_at
from speculator.decoding.drafter import Shape
from speculator.heads.attention.base import attend
from speculator.heads.attention.joint_attention import (
    QueryRows,
    fused_dtype,
    joint_attention,
    positions_with_label,
    scores_of_a_head,
)
from speculator.heads.attention.levels import LevelCache, LevelSource, with_own
from speculator.heads.mtp.block import MTPLayer, Rotary, empty_decoder
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
    """MTP layers; the embedding and the output matrix are the target's."""

    config_class = MTPSpeculatorConfig
    config: MTPSpeculatorConfig
    layers: Any  # of `MTPLayer`

    def __init__(self, config: MTPSpeculatorConfig):
        super().__init__(config)
        block: Any = config.block
        decoder: Any = empty_decoder(block)
        eps = getattr(decoder.config, "rms_norm_eps", 1e-6)
        self.layers = nn.ModuleList(MTPLayer(each, type(decoder.norm), config.emb_dim, eps) for each in decoder.layers)
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
        return self.n_predict * (layers // len(self.layers) + 2 * self.config.output_size * self.config.emb_dim // 3)

    def drafting_source(self) -> MTPSource:
        return MTPSource(self)

    # --- what it shares with its target

    def bind(self, target: PreTrainedConfig, embedding: Tensor, output: nn.Linear) -> None:
        self.share(embedding, output)

    def output(self, index: int) -> nn.Linear:  # D -> V_d
        return self.target_output

    def draft_logits(self, features: Tensor) -> Tensor:  # [..., D] -> [..., V]
        return self.to_full_vocabulary(self.output_logits(features))

    # --- what both forms compute

    @property
    def is_chain(self) -> bool:
        """Whether it has several layers, each of which drafts one token; a single layer drafts any number."""
        return len(self.layers) > 1

    def run(
        self, index: int, embedded: Tensor, state: Tensor, positions: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:  # [B, T, D] twice
        """Run layer `index`; return what the output matrix reads, and the state that the next step reads.

        Args:
            embedded: [B, T, D] embeddings of the tokens after `positions`.
            state: [B, T, D] the target's hidden states, or the states of the step before.
            positions: [B, T] positions in the text.
            attend: the pass's attention, see `speculator.heads.mtp.block.Attend`.
        """
        layer = self.layers[index]
        y = layer(embedded, state, self.rotary(index, embedded, positions), positions, attend)
        feature = layer.norm(y)
        return feature, feature if self.is_chain or self.config.recycle_normed else y

    @torch.no_grad()
    def shapes(self) -> tuple[torch.Size, torch.Size]:
        """Shapes [1, 1, K, d] of the keys and values of one position, found by running the layer once."""
        found: list[torch.Size] = []

        def note(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
            found.extend([key.shape, value.shape])
            return value[:, :, :1].expand(-1, -1, query.shape[2], -1)

        weight = self.layers[0].eh_proj.weight
        x = weight.new_zeros(1, 1, self.config.emb_dim)
        self.run(0, x, x, torch.zeros(1, 1, dtype=torch.long, device=x.device), note)
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

        A single layer's features are 0 outside the loss mask from step 1 on; a chain of layers ignores the mask.
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
        state, features = states.to(embedded.dtype), []
        if self.is_chain:
            for i in range(self.n_predict):
                # Every layer has its own keys, of all positions of the text.
                embedded = embedded if i == 0 else self.embed(tokens[:, i : i + length])
                feature, state, *_ = self._step(i, 0, rows, embedded, state, positions[None])
                features.append(feature)
            return features

        feature, state, *text = self._step(0, 0, rows, embedded, state, positions[None])
        features.append(feature)
        wanted = positions_with_label(documents.numel(), loss_mask)
        # From step 1 on only positions with a label: R rows as one sequence, [1, R, D].
        rows = QueryRows(wanted, starts, limit, None, states.device)
        state = state.flatten(0, 1)[None, rows.wanted]
        # No own keys yet, in the shape [0, R, K, d] to which each step adds one.
        own = [x[0, :0, None].expand(0, len(wanted), -1, -1) for x in text]
        for i in range(1, self.n_predict):
            # Step i of position t reads x[t+1+i] = tokens[:, t + i] with the rope of t + i.
            embedded = self.embed(tokens[rows.sequences, rows.positions + i])[None]
            feature, state, *made = self._step(0, i, rows, embedded, state, (rows.positions + i)[None], *text, *own)
            own = [torch.cat([before, new]) for before, new in zip(own, made, strict=True)]
            features.append(rows.whole(feature[0]).view(*documents.shape, -1))
        return features

    def _step(
        self, index: int, step: int, rows: QueryRows, embedded: Tensor, state: Tensor, positions: Tensor, *kept: Tensor
    ) -> tuple[Tensor, ...]:
        """Run layer `index`, recomputed in the backward pass; return features, state, keys and values. See `Joint`."""

        def work(embedded: Tensor, state: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
            attend = Joint(rows, step, kept)
            return *self.run(index, embedded, state, positions, attend), *attend.made

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


class MTPCache(LevelCache):
    """Keys and values of texts in every layer; see `LevelCache` for the draft after them.

    In a chain of layers (`is_chain`), layer i reads tokens up to i positions ahead, so its newest keys change when the
    text goes on. The cache therefore keeps what layer 0 reads, and all layers run again at the last positions.

    Attributes:
        text: [B, capacity, D] and [B, capacity]: the target's state at each position, and the token after it; None
            without a chain of layers, which has no `before` and `path` either.
        before: [B, 1, D] for each level l >= 1: the state that layer l reads at its first drafted position.
        path: at level l, for the paths to the f newest tokens: the states [B, f, l, D] of layer l at the last l text
            positions, and the tokens [B, f, l].
    """

    text: tuple[Tensor, Tensor] | None = None
    before: list[Tensor]
    path: tuple[Tensor, Tensor]

    def select(self, start: int, stop: int, longest: int) -> Self:
        part = super().select(start, stop, longest)
        part.text = self.text and tuple(x[start:stop] for x in self.text)  # type: ignore[assignment]
        return part

    def move(self, source: Sequence[int], destination: Sequence[int], longest: int) -> None:
        super().move(source, destination, longest)
        for x in self.text or ():
            x[list(destination), :longest] = x[list(source), :longest]

    def grow(self, capacity: int) -> None:
        if self.text:
            states, tokens = self.text
            more = max(0, capacity - tokens.shape[1])
            self.text = nn.functional.pad(states, (0, 0, 0, more)), nn.functional.pad(tokens, (0, more))
        super().grow(capacity)


class PassAttention:
    """Attention of one pass, an `Attend`: it writes its keys and values, and attends to those that a token sees.

    Args:
        cache: the rows' keys and values.
        layer: number of the layer.
        written: [B, T] positions of the cache that the pass writes.
        seen: returns a mask [B, T, M] of the cache's positions that each token sees, given the sliding window or None.
    """

    def __init__(self, cache: MTPCache, layer: int, written: Tensor, seen: Callable[[int | None], Tensor]):
        self.cache, self.layer, self.written, self.seen = cache, layer, written, seen

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        self.cache.write(self.layer, key, value, self.written)
        seen = self.seen(window)
        keys, values = (x[self.layer][:, :, : seen.shape[2]] for x in (self.cache.keys, self.cache.values))
        return attend(query, keys, values, seen, scaling)


class MTPForm:
    """Computes for one more token what `MTPSpeculator.unrolled` computes for all positions."""

    def __init__(self, head: MTPSpeculator):
        self.head = head

    def cache(self, rows: int, capacity: int) -> MTPCache:
        """Create an empty cache for `rows` sequences of at most `capacity` tokens, drafts included."""
        head, like = self.head, self.head.layers[0].eh_proj.weight
        key, value = head.shapes()
        cache = MTPCache(len(head.layers), rows, key[2], capacity, key[3], like, value[3])
        if head.is_chain:
            tokens = torch.zeros(rows, capacity, dtype=torch.long, device=like.device)
            cache.text = like.new_zeros(rows, capacity, head.config.emb_dim), tokens
        return cache

    @torch.no_grad()
    def read(
        self,
        cache: MTPCache,
        states: Tensor,  # [B, T, D] at the positions after those in the cache
        tokens: Tensor,  # [B, T] token after each
        counts: Tensor,  # [B] number of valid positions of each row, from the left
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Process text without drafting from it: write every layer's keys and values into the cache.

        Returns each layer's features and next states, [B, T', D] both (see `MTPSpeculator.run`), and [B] how many of
        the T' positions are valid. T' is T; a chain also rereads the last positions, one per layer but the first.
        """
        head, width = self.head, states.shape[1]
        begins = cache.lengths.clone()
        if head.is_chain:
            assert cache.text is not None
            # Read the last positions again: a layer there has read tokens that were not accepted, or none yet. Of three
            # layers that is 2: layer 2 at the last position reads two tokens beyond the pending one.
            again = len(head.layers) - 1
            row = torch.arange(len(tokens), device=tokens.device)[:, None]
            new = begins[:, None] + torch.arange(width, device=tokens.device)
            cache.text[0][row, new], cache.text[1][row, new] = states, tokens
            begins = (begins - again).clamp_min(0)
            width, counts = width + again, counts + cache.lengths - begins
        positions = begins[:, None] + torch.arange(width, device=tokens.device)
        columns = cache.columns(width)

        def seen(window: int | None) -> Tensor:
            near = columns <= positions[..., None]
            return near if window is None else near & (columns > positions[..., None] - window)

        made: list[tuple[Tensor, Tensor]] = []
        for i in range(len(head.layers)):
            if head.is_chain:
                # Layer i reads the state of the layer before at the same position, and the token i + 1 after it.
                states = cache.text[0][row, positions] if i == 0 else made[-1][1]  # type: ignore[index]
                tokens = cache.text[1][row, (positions + i).clamp_max(cache.text[1].shape[1] - 1)]  # type: ignore[index]
            embedded = head.embed(tokens)
            if head.config.zero_first and i == 0:
                embedded = embedded * (positions != 0)[..., None]
            made.append(head.run(i, embedded, states, positions, PassAttention(cache, i, positions, seen)))
        cache.lengths.copy_(begins + counts)
        cache.longest += width
        return made, counts

    @torch.no_grad()
    def first(self, cache: MTPCache, states: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        """Process accepted tokens (see `read`), the last of which is pending; return a draft's first logits."""
        made, valid = self.read(cache, states, tokens, counts)
        cache.level = 0
        cache.seen = cache.lengths.new_zeros(len(states), 1, 0, dtype=torch.bool)
        # An idle row has count 0; its logits are not used.
        feature, cache.states = (gather_at(x, (valid - 1).clamp_min(0)[:, None]) for x in made[0])
        if self.head.is_chain:
            # With T positions of text, layer l is drafted at T - l first, and reads the state of layer l - 1 there.
            cache.before = [
                gather_at(state, (valid - level).clamp_min(0)[:, None]) for level, (_, state) in enumerate(made, 1)
            ]
            cache.path = cache.states[:, :, :0, None], tokens[:, :1, None][..., :0]
        return self.head.draft_logits(feature)

    @torch.no_grad()
    def next(
        self,
        cache: MTPCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Process a level of a draft: write its keys and values, and return the logits of its children."""
        if self.head.is_chain:
            return self._next_of_chain(cache, tokens, parents)
        attend = PassAttention(cache, 0, cache.begin_level(parents), cache.visible)
        state, position = gather_at(cache.states, parents), cache.rope_position.expand_as(tokens)
        feature, cache.states = self.head.run(0, self.head.embed(tokens), state, position, attend)
        return self.head.draft_logits(feature)

    def _next_of_chain(self, cache: MTPCache, tokens: Tensor, parents: Tensor) -> Tensor:  # [B, f] twice -> [B, f, V]
        """Do what `next` does, for a chain of layers: raise `cache.level` to l, and run layer l (counted from 0).

        For each of the f newest tokens, layer l runs at the last l text positions, on the path to that token.
        """
        cache.level += 1
        head, level, count = self.head, cache.level, tokens.shape[1]
        # Layer l reads the state of layer l - 1 at the same position. After a text of T positions and the path d1 d2,
        # layer 2 runs at T - 2, where it reads d1, and at T - 1, where it reads d2.
        states, before = (gather_at(x.flatten(2), parents) for x in cache.path)
        first = cache.before[level - 1].expand(-1, count, -1)
        states = torch.cat([first, states], -1).unflatten(2, (level, -1))  # [B, f, l, D]
        path = torch.cat([before, tokens[..., None]], -1)  # [B, f, l]
        own = torch.arange(count * level, device=tokens.device)
        positions = (cache.lengths[:, None] - level) + own % level  # the l last ones, once per token
        written = cache.lengths[:, None] + own  # each path has its own, so that siblings share none
        columns = cache.columns(count * level)
        # A path sees its own positions up to each; those before the text's beginning do not exist.
        same = (own[:, None] // level == own // level) & (own <= own[:, None])
        same = (same & (positions[:, None] >= 0)) | (own == own[:, None])

        def seen(window: int | None) -> Tensor:
            text = (columns < cache.lengths[:, None, None] - level).repeat(1, len(own), 1)
            if window is not None:
                text &= columns > positions[..., None] - window
            return with_own(text, written, same)

        attend = PassAttention(cache, level, written, seen)
        feature, states = head.run(level, head.embed(path.flatten(1)), states.flatten(1, 2), positions, attend)
        # [B, f * l, D] -> [B, f, l, D]: the states of each path, of which the last position gives the logits.
        cache.path = states.unflatten(1, (count, level)), path
        return head.draft_logits(feature.unflatten(1, (count, level))[:, :, -1])


class MTPSource(LevelSource):
    """Drafts by MTP layers, with keys and values as in `LevelSource`: position t of the cache reads x[t+1] here too."""

    cache: MTPCache

    def __init__(self, head: MTPSpeculator):
        super().__init__(head, MTPForm(head))

    def reserve(self, shape: Shape) -> None:
        self._reserve(shape.depth, shape.offered * (shape.depth if self.head.is_chain else 1))
