"""EAGLE-3 (arXiv 2503.01840) as servers run it, with the norms of EAGLE-3.1 (2605.09992).

Position t reads the auxiliary hidden states at t and the token after it:

    g = fc(cat(aux_hidden at t))                        fc_norm: a norm per layer; norm_before_fc: one norm over all
    e = embed(x[t+1])                                   the target's own embedding
    u = cat(rms(e; input_layernorm), rms(g; hidden_norm))
    h = g + o_proj(attention(q(u), k(u), v(u)))         rope at position t; norm_before_residual: rms(g) + ...
    s = h + down(silu(gate(y)) * up(y)),  y = rms(h; post_attention_layernorm)
    logits = lm_head(rms(s; norm))                      of x[t+2]

Step i continues step i-1 of the same position: g is s, or rms(s; norm) with norm_output; it reads x[t+1+i] with the
rope of t + i, and drafts x[t+2+i]. It attends to the keys of step 0 at positions 0..t and of its own steps 1..i. A
draft sees the same: the text up to t, then its own tokens. For t = 2 and step 2, with T a
text position and D a drafted token:

    keys         T 0     T 1     T 2     D 1     D 2
    read         x1      x2      x3      x4      x5
    position     0       1       2       3       4

The training form, all steps of all positions of a text, comes first, then the drafting form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from speculator.decoding.draft import gather_at
from speculator.errors import UserError
from speculator.heads.attention.base import AttentionHead, Norm, Rope, attend, default_aux_layers
from speculator.heads.attention.joint_attention import (
    QueryRows,
    fused_dtype,
    joint_attention,
    positions_with_label,
    scores_of_a_head,
)
from speculator.heads.attention.levels import LevelCache, LevelSource
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.layer import Eagle3Layer
from speculator.heads.unrolled import UnrolledHead
from speculator.target.packed import document_starts


class Eagle3Speculator(UnrolledHead, AttentionHead):
    """One attention layer over the target's auxiliary hidden states; module names follow the `speculators` layout."""

    config_class = Eagle3SpeculatorConfig

    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__(config)
        size, wide = config.emb_dim, config.num_aux_layers * config.emb_dim
        if config.norm_before_fc:
            self.input_norm = Norm(wide, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(size, config.rms_norm_eps) for _ in range(config.num_aux_layers))
        self.fc = nn.Linear(wide, size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = Norm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.output_size, bias=False)
        self._shared_embedding: list[Tensor] = []  # a list, so that it is not one of this module's weights
        self.rope = Rope(config)
        if config.own_embedding:  # part of the checkpoint, and frozen
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
            self.embed_tokens.requires_grad_(False)
        self.post_init()

    def weights_per_token(self, length: int) -> int:
        once = self.fc.weight.numel()
        return once + self.n_predict * (super().weights_per_token(length) - once)

    def drafting_source(self) -> LevelSource:
        return LevelSource(self, Eagle3Form(self))

    # --- what it shares with its target

    def bind(self, target: PreTrainedConfig, embedding: Tensor, output: nn.Linear) -> None:
        self.config.aux_layers = self.config.aux_layers or default_aux_layers(target.num_hidden_layers)
        self.check_width(embedding)
        self.share_embedding(embedding)

    def share_embedding(
        self,
        weight: Tensor,  # [V, D] the target's; neither copied nor saved
    ) -> None:
        """Read tokens by this embedding, unless the head has one of its own with other values (as vLLM does)."""
        if self.config.own_embedding:
            own = self.embed_tokens.weight
            if not torch.equal(own, weight.to(own)):
                return
            del self.embed_tokens
            self.config.own_embedding = False
        self._shared_embedding = [weight.detach()]

    @property
    def embedding_weight(self) -> Tensor | None:  # [V, D]
        """Embedding in use: the shared one, the head's own, or None."""
        if self._shared_embedding:
            return self._shared_embedding[-1]
        return self.embed_tokens.weight if self.config.own_embedding else None

    @torch.no_grad()
    def initialise_from(self, embedding: Tensor, output: Tensor) -> None:  # [V, D] twice
        """Copy the target's output matrix, and its embedding where a random one would be frozen."""
        self.lm_head.weight.copy_(self.draft_rows(output))
        if self.config.own_embedding:
            self.embed_tokens.weight.copy_(embedding)

    # --- what both forms compute

    @property
    def layer(self) -> Eagle3Layer:
        return cast(Eagle3Layer, self.layers[0])

    def output(self, index: int) -> nn.Linear:
        return self.lm_head

    def embed(self, tokens: Tensor) -> Tensor:  # [...] -> [..., D]
        """Embed token ids by `embedding_weight`, in the dtype of `fc`; raises a UserError if it is None."""
        weight = self.embedding_weight
        if weight is None:
            raise UserError("the head reads its target's embedding, and was given none")
        return nn.functional.embedding(tokens, weight).to(self.fc.weight.dtype)

    def fuse(self, aux_hidden: Tensor) -> Tensor:  # [..., nD] -> [..., D]
        """Project the auxiliary hidden states to the width D, which gives g of step 0 (see the module)."""
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            parts = aux_hidden.chunk(len(self.fc_norm), -1)
            aux_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux_hidden)

    def finish(self, s: Tensor) -> tuple[Tensor, Tensor]:  # [..., D] -> [..., D] twice
        """Compute what lm_head reads, and g of the next step, from the layer's output s."""
        normed = self.norm(s)
        return normed, normed if self.config.norm_output else s

    # --- training: all steps of all positions

    def unrolled(
        self,
        states: Tensor,  # [B, S, nD] auxiliary hidden states
        tokens: Tensor,  # [B, S+N-1] step i of position t reads tokens[:, t + i]
        documents: Tensor | None = None,  # [B, S] document of each position, on the CPU; None: one document a row
        loss_mask: Tensor | None = None,  # [B, S] positions where features are needed, on the CPU; None: all
    ) -> list[Tensor]:  # N x [B, S, D]
        """Compute what `lm_head` reads at each of the N steps, see `UnrolledHead.unrolled`.

        Features are 0 outside the loss mask, where only the keys and values of step 0 are computed. The backward pass
        recomputes projections, MLP and attention scores; a few states per step are kept for it.
        """
        length, layer = states.shape[1], self.layer
        if documents is None:
            documents = torch.zeros(len(tokens), length, dtype=torch.long)
        g = self.fuse(states)
        positions = torch.arange(length, device=states.device)
        # Position t reads h_t and x[t+1], which is tokens[:, t]: the caller has cut off x[0].
        u, _ = layer.enter(self.embed(tokens[:, :length]), g)
        keys, values = layer.self_attn.key_value(u, self.rope(positions, self.fc.weight.dtype))

        # Indices into the flattened [B * S] positions: of those without a label only keys and values are computed.
        wanted, kind = positions_with_label(documents.numel(), loss_mask), states.device.type
        limit = scores_of_a_head(kind, self.config.num_attention_heads)
        rows = QueryRows(wanted, document_starts(documents), limit, self.config.sliding_window, states.device)
        fused = fused_dtype(keys, kind)

        def recomputed(work: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
            return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

        def cast(*given: Tensor) -> list[Tensor]:  # under autocast, rope returns float32
            return [x.to(fused or x.dtype) for x in given]

        keys, values = cast(keys, values)
        # From here on, rows are the R wanted positions of all sequences, end to end: [R, D].
        g = g.flatten(0, 1)[rows.wanted]
        # At step 0 a position's own key is among those of the text.
        own_keys, own_values = keys[0, :0, None].expand(0, len(wanted), -1, -1), values[0, :0, None]
        own_values = own_values.expand_as(own_keys)
        features = []
        for i in range(self.n_predict):
            # Step i of position t reads x[t+1+i] = tokens[:, t + i] with the rope of t + i.
            query, key, value, residual = recomputed(
                self._enter, g, tokens[rows.sequences, rows.positions + i], rows.positions + i
            )
            query, key, value = cast(query, key, value)
            # Every row keeps the keys of its own steps 1..i; the text's keys come from step 0 of all positions.
            if i:
                own_keys, own_values = torch.cat([own_keys, key[None]]), torch.cat([own_values, value[None]])
            attended = joint_attention(rows, i, fused is not None, query, keys, values, own_keys, own_values)
            feature, g = recomputed(self._leave, residual, attended)
            features.append(rows.whole(feature).view(*documents.shape, -1))
        return features

    def _enter(self, g: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:  # [R, D], [R], [R]
        """Return a step's query [R, H, d], key and value [R, K, d], and residual [R, D]."""
        u, residual = self.layer.enter(self.embed(tokens), g)
        rope = self.rope(positions, self.fc.weight.dtype)
        return self.layer.self_attn.query(u, rope), *self.layer.self_attn.key_value(u, rope), residual

    def _leave(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, ...]:  # [R, D], [R, H, d]
        """Return what the output matrix reads, and the state g that the next step reads, [R, D] both."""
        return self.finish(self.layer.leave(residual, attended))

    # --- export

    def logits(
        self,
        hidden: Tensor,  # [B, S, nD]
        tokens: Tensor,  # [B, S+N-1]
        embedding: Tensor | None = None,  # [V, D] replaces the embedding in use
    ) -> Tensor:  # [N, B, S, V]
        shared = self._shared_embedding
        if embedding is not None:
            self._shared_embedding = [embedding]
        try:
            return super().logits(hidden, tokens)
        finally:
            self._shared_embedding = shared


# --- drafting


class Eagle3Form:
    """Computes for one more token what `Eagle3Speculator.unrolled` computes for all positions."""

    def __init__(self, head: Eagle3Speculator):
        self.head = head

    def cache(self, rows: int, capacity: int) -> LevelCache:
        """Create an empty cache for `rows` sequences of at most `capacity` tokens, drafts included."""
        config = self.head.config
        size = config.num_key_value_heads, capacity, config.head_dim
        return LevelCache(len(self.head.layers), rows, *size, self.head.fc.weight)

    @torch.no_grad()
    def read(
        self,
        cache: LevelCache,
        aux_hidden: Tensor,  # [B, T, nD] at the positions after those in the cache
        tokens: Tensor,  # [B, T] token after each
        counts: Tensor,  # [B] number of valid positions of each row, from the left
    ) -> tuple[Tensor, Tensor]:  # [B, T, 2D], [B, T, D]
        """Append text to the cache without drafting from it; return the layer's input u and residual."""
        head, layer = self.head, self.head.layer
        positions = cache.lengths[:, None] + torch.arange(aux_hidden.shape[1], device=aux_hidden.device)
        u, residual = layer.enter(head.embed(tokens), head.fuse(aux_hidden))
        cache.write(0, *layer.self_attn.key_value(u, head.rope(positions, u.dtype)), positions)
        cache.lengths += counts
        cache.longest += aux_hidden.shape[1]
        return u, residual

    @torch.no_grad()
    def first(self, cache: LevelCache, aux_hidden: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        """Process accepted tokens (see `read`), the last of which is pending; return a draft's first logits."""
        u, residual = self.read(cache, aux_hidden, tokens, counts)
        cache.level = 0
        cache.seen = cache.lengths.new_zeros(len(aux_hidden), 1, 0, dtype=torch.bool)
        last = (counts - 1).clamp_min(0)[:, None]  # an idle row has count 0; its logits are not used
        return self._level(cache, gather_at(u, last), gather_at(residual, last))

    @torch.no_grad()
    def next(
        self,
        cache: LevelCache,
        tokens: Tensor,  # [B, f] the newest level
        parents: Tensor,  # [B, f] index of each token's parent in the level before
    ) -> Tensor:  # [B, f, V]
        """Process a level of a draft: write its keys and values, and return the logits of its children."""
        head, layer = self.head, self.head.layer
        positions = cache.begin_level(parents)
        u, residual = layer.enter(head.embed(tokens), gather_at(cache.states, parents))
        cache.write(0, *layer.self_attn.key_value(u, head.rope(cache.rope_position, u.dtype)), positions)
        return self._level(cache, u, residual)

    def _level(self, cache: LevelCache, u: Tensor, residual: Tensor) -> Tensor:  # [B, f, 2D], [B, f, D] -> [B, f, V]
        head, layer = self.head, self.head.layer
        seen = cache.visible(head.config.sliding_window)
        # The head has one layer, 0. Positions beyond the mask's columns are free, or left from earlier drafts.
        keys, values = (x[0][:, :, : seen.shape[2]] for x in (cache.keys, cache.values))
        query = layer.self_attn.query(u, head.rope(cache.rope_position, u.dtype))
        attended = attend(query, keys, values, seen)
        feature, cache.states = head.finish(layer.leave(residual, attended))
        return head.to_full_vocabulary(head.lm_head(feature))
