"""The attention head: EAGLE-3 (arXiv 2503.01840) as servers run it, with the norms of EAGLE-3.1 (2605.09992).

Tap k is the target's residual stream after k of its layers. Position t is made of the aux_hidden at t and the token after it:

    g = fc(cat(aux_hidden at t))                              fc_norm: a norm per tap; norm_before_fc: one over all of them
    e = embed(x[t+1])                                   the target's own embedding
    u = cat(rms(e; input_layernorm), rms(g; hidden_norm))
    h = g + o_proj(attention(q(u), k(u), v(u)))         rope at position t; norm_before_residual: rms(g) + ...
    s = h + down(silu(gate(y)) * up(y)),  y = rms(h; post_attention_layernorm)
    logits = lm_head(rms(s; norm))                      of x[t+2]

Step i goes on from step i-1 of the same position: g is s, or rms(s; norm) with norm_output; it reads x[t+1+i], with the
rope of t + i, and drafts x[t+2+i]. It sees the keys of step 0 of positions 0..t and those of the steps 1..i of its own.
That is what a draft sees: the text up to t, then its own tokens. For t = 2 and step 2, T a position of the text, D
a drafted token:

    keys         T 0     T 1     T 2     D 1     D 2
    read         x1      x2      x3      x4      x5
    position     0       1       2       3       4

Two forms of one function. `forward` runs all steps of all positions of a text (training). `first` and `next` draft,
with a `HeadCache` of the text's keys and values: `first` reads what was accepted (`read` does no more), `next` a level
of drafted tokens.

Longer than other files: the training form and the drafting form of one layer are to be compared line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from speculator.decoding.draft import gather_at
from speculator.errors import UserError
from speculator.heads.attention import AttentionHead, HeadCache
from speculator.heads.base import Loss
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig, default_aux_layers
from speculator.heads.eagle3.joint_attention import Rows, fused_dtype, joint_attention
from speculator.heads.eagle3.layer import Layer, Norm, Rope, attend
from speculator.target.packed import document_starts

_SCORES = {"cpu": 2**20}
_SCORES_ON_GPU = 2**25
"""Attention scores that exist at a time in training, by kind of device."""


class Eagle3Speculator(AttentionHead):
    """One layer of attention over the target's aux_hidden. The modules have the names of the `speculators` layout."""

    config_class = Eagle3SpeculatorConfig
    device_kind: str | None = None
    """On which its training is traced, other than its own."""

    def __init__(self, config: Eagle3SpeculatorConfig):
        super().__init__(config)
        size, wide = config.emb_dim, config.num_aux_layers * config.emb_dim
        if config.norm_before_fc:
            self.input_norm = Norm(wide, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(size, config.rms_norm_eps) for _ in range(config.num_aux_layers))
        self.fc = nn.Linear(wide, size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.output_size, bias=False)
        self._lent: list[Tensor] = []  # in a list, so that it is none of this module's weights
        self.rope = Rope(config)
        if config.own_embedding:
            self.have_embedding()
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)

    @property
    def aux_layers(self) -> Sequence[int]:
        return tuple(self.config.aux_layers or ())

    # --- what it has of its target

    def bind(self, target: PreTrainedConfig, embedding: Tensor) -> None:
        """Its aux_hidden, where it names none, and its embedding, where it has none.

        Raises:
            UserError: too few layers for `default_aux_layers`, or an embedding of another width.
        """
        self.config.aux_layers = self.config.aux_layers or default_aux_layers(target.num_hidden_layers)
        width = embedding.shape[1]
        if width != self.config.emb_dim:
            raise UserError(f"the head reads embeddings of size {self.config.emb_dim}, the target has {width}")
        self.share_embedding(embedding)

    def have_embedding(self) -> None:
        """Have an embedding of its own: frozen, and part of its checkpoint."""
        self.config.own_embedding = True
        self.embed_tokens = nn.Embedding(self.config.vocab_size, self.config.emb_dim)
        self.embed_tokens.requires_grad_(False)

    def share_embedding(
        self,
        weight: Tensor,  # [V, D] the target's, as it is: no copy is made, and none is saved
    ) -> None:
        """Read this one, if the head has none of its own or one that is equal: what vLLM does."""
        if self.config.own_embedding:
            own = self.embed_tokens.weight
            if not torch.equal(own, weight.to(own)):
                return
            del self.embed_tokens
            self.config.own_embedding = False
        self._lent = [weight.detach()]

    @property
    def embedding_weight(self) -> Tensor | None:  # [V, D]
        """What tokens are read by: the one that it was lent, its own, or None."""
        if self._lent:
            return self._lent[-1]
        return self.embed_tokens.weight if self.config.own_embedding else None

    @torch.no_grad()
    def initialise_from(self, embedding: Tensor, output: Tensor) -> None:  # [V, D] twice
        """Let the output matrix be the target's; its embedding is shared anyway."""
        self.lm_head.weight.copy_(self.draft_rows(output))

    def _embedded(self, tokens: Tensor) -> Tensor:  # [...] -> [..., D]
        weight = self.embedding_weight
        if weight is None:
            raise UserError("the head reads its target's embedding, and was given none")
        return nn.functional.embedding(tokens, weight).to(self.fc.weight.dtype)

    # --- what both forms share

    @property
    def _layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    def _fused(self, aux_hidden: Tensor) -> Tensor:  # [..., nD] -> [..., D]
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.config.fc_norm:
            parts = aux_hidden.chunk(len(self.fc_norm), -1)
            aux_hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux_hidden)

    def _handed_on(self, state: Tensor) -> tuple[Tensor, Tensor]:  # [..., D] -> what lm_head reads, the next step's g
        normed = self.norm(state)
        return normed, normed if self.config.norm_output else state

    # --- training: all steps of all positions

    def unrolled(
        self,
        aux_hidden: Tensor,  # [B, S, nD]
        tokens: Tensor,  # [B, S+N-1] step i of position t reads tokens[:, t + i]
        documents: Tensor | None = None,  # [B, S] the same number throughout a document, which is one piece
        loss_mask: Tensor | None = None,  # [B, S] bool: positions of which a step is wanted; None: all
    ) -> list[Tensor]:  # N x [B, S, D]
        """What the output matrix reads, of each step; 0 at the positions that are not wanted.

        Those have keys and values, and no more. What is held of the others until the backward pass is a few states per
        step: projections, MLP and the attention's scores are made anew.
        """
        length, layer = aux_hidden.shape[1], self._layer
        if documents is None:
            documents = torch.zeros_like(tokens[:, :length])
        g = self._fused(aux_hidden)
        positions = torch.arange(length, device=aux_hidden.device)
        u, _ = layer.enter(self._embedded(tokens[:, :length]), g)
        keys, values = layer.self_attn.key_value(u, self.rope(positions, u.dtype))

        everything = torch.arange(documents.numel(), device=aux_hidden.device)
        wanted = everything if loss_mask is None else loss_mask.flatten().nonzero()[:, 0]
        if not len(wanted):
            wanted = everything[:1]  # every weight then has a gradient, as DDP asks
        kind = self.device_kind or aux_hidden.device.type
        limit = _SCORES.get(kind, _SCORES_ON_GPU) // self.config.num_attention_heads
        rows = Rows(wanted, document_starts(documents), limit, self.config.sliding_window)
        fused = fused_dtype(keys, kind)

        def again(work: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
            return checkpoint(work, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

        def cast(*given: Tensor) -> list[Tensor]:  # under autocast rope leaves float32
            return [x.to(fused or x.dtype) for x in given]

        keys, values = cast(keys, values)
        g = g.flatten(0, 1)[wanted]
        # Of step 0 a position sees its own key among the others'.
        own_keys, own_values = keys[0, :0, None].expand(0, len(wanted), -1, -1), values[0, :0, None]
        own_values = own_values.expand_as(own_keys)
        features = []
        for i in range(self.n_predict):
            query, key, value, residual = again(
                self._enter, g, tokens[rows.sequences, rows.places + i], rows.places + i
            )
            query, key, value = cast(query, key, value)
            if i:
                own_keys, own_values = torch.cat([own_keys, key[None]]), torch.cat([own_values, value[None]])
            attended = joint_attention(rows, i, fused is not None, query, keys, values, own_keys, own_values)
            feature, g = again(self._leave, residual, attended)
            features.append(rows.whole(feature).view(*documents.shape, -1))
        return features

    def _enter(self, g: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        u, residual = self._layer.enter(self._embedded(tokens), g)
        rope = self.rope(positions, u.dtype)
        return self._layer.self_attn.query(u, rope), *self._layer.self_attn.key_value(u, rope), residual

    def _leave(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        return self._handed_on(self._layer.leave(residual, attended))

    def forward(
        self,
        hidden: Tensor,  # [B, S, nD]
        tokens: Tensor,  # [B, S+N-1]
        measure: Loss,
        documents: Tensor | None = None,  # [B, S]
        loss_mask: Tensor | None = None,  # [B, S]
    ) -> dict[str, Tensor]:
        features = self.unrolled(hidden, tokens, documents, loss_mask)
        return measure(features, [self.lm_head] * self.n_predict, self.draft_tokens)

    def logits(
        self,
        hidden: Tensor,  # [B, S, nD]
        tokens: Tensor,  # [B, S+N-1]
        embedding: Tensor | None = None,  # [V, D] to read the tokens by, whatever the head has
    ) -> Tensor:  # [N, B, S, V]
        """Every step's logits, for tests and exporters: all of them in memory at once."""
        had = self._lent
        if embedding is not None:
            self._lent = [embedding]
        try:
            return torch.stack([self.to_full_vocabulary(self.lm_head(x)) for x in self.unrolled(hidden, tokens)])
        finally:
            self._lent = had

    def probe(self) -> tuple[Tensor, ...]:
        hidden, tokens = super().probe()
        config = self.config
        aux_hidden = torch.cat([hidden.roll(i, -1) for i in range(config.num_aux_layers)], -1)
        # An embedding of noise, the rows of which overlap: a whole one may be gigabytes.
        noise = torch.randn(config.vocab_size + config.emb_dim - 1, generator=torch.Generator().manual_seed(1))
        return aux_hidden, tokens, noise.to(self.device, self.dtype).unfold(0, config.emb_dim, 1)

    # --- drafting: level by level

    def memory(self, rows: int, capacity: int) -> HeadCache:
        config = self.config
        return HeadCache(rows, config.num_key_value_heads, capacity, config.head_dim, self.fc.weight)

    @torch.no_grad()
    def read(self, memory: HeadCache, aux_hidden: Tensor, tokens: Tensor, counts: Tensor) -> None:
        self._read(memory, aux_hidden, tokens, counts)

    def _read(self, memory: HeadCache, aux_hidden: Tensor, tokens: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads at each position, [B, T, 2D], and its residual, [B, T, D]."""
        layer = self._layer
        positions = memory.lengths[:, None] + torch.arange(aux_hidden.shape[1], device=aux_hidden.device)
        u, residual = layer.enter(self._embedded(tokens), self._fused(aux_hidden))
        memory.write(*layer.self_attn.key_value(u, self.rope(positions, u.dtype)), positions)
        memory.lengths += counts
        memory.longest += aux_hidden.shape[1]
        return u, residual

    @torch.no_grad()
    def first(self, memory: HeadCache, aux_hidden: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:  # [B, 1, V]
        u, residual = self._read(memory, aux_hidden, tokens, counts)
        memory.level = 0
        memory.seen = memory.lengths.new_zeros(len(aux_hidden), 1, 0, dtype=torch.bool)
        last = (counts - 1).clamp_min(0)[:, None]  # a row that reads nothing is finished: any state will do
        return self._level(memory, gather_at(u, last), gather_at(residual, last))

    @torch.no_grad()
    def next(self, memory: HeadCache, tokens: Tensor, parents: Tensor) -> Tensor:  # [B, f, V]
        layer, count = self._layer, tokens.shape[1]
        drafted = memory.seen.shape[2]
        own = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
        memory.seen = torch.cat([gather_at(memory.seen, parents), own], -1)
        memory.level += 1
        slots = memory.lengths[:, None] + drafted + torch.arange(count, device=tokens.device)
        u, residual = layer.enter(self._embedded(tokens), gather_at(memory.states, parents))
        memory.write(*layer.self_attn.key_value(u, self.rope(self._position(memory), u.dtype)), slots)
        return self._level(memory, u, residual)

    def _position(self, memory: HeadCache) -> Tensor:  # [B, 1]
        """Of the tokens of the newest level: the last position of text is level 0."""
        return (memory.lengths - 1 + memory.level)[:, None]

    def _level(self, memory: HeadCache, u: Tensor, residual: Tensor) -> Tensor:  # [B, f, 2D], [B, f, D] -> [B, f, V]
        layer, drafted, position = self._layer, memory.seen.shape[2], self._position(memory)
        extent = min(memory.longest + drafted, memory.keys.shape[2])
        slots = torch.arange(extent, device=u.device)
        seen = slots < memory.lengths[:, None]
        if self.config.sliding_window is not None:
            seen &= slots > position - self.config.sliding_window
        seen = seen[:, None].repeat(1, u.shape[1], 1)
        own = memory.lengths[:, None] + torch.arange(drafted, device=u.device)
        own = own.clamp(max=extent - 1)  # a row that goes along in a captured step may be longer than `longest`
        seen = seen.scatter(2, own[:, None].expand_as(memory.seen), memory.seen)
        query = layer.self_attn.query(u, self.rope(position, u.dtype))
        attended = attend(query, memory.keys[:, :, :extent], memory.values[:, :, :extent], seen)
        feature, memory.states = self._handed_on(layer.leave(residual, attended))
        return self.to_full_vocabulary(self.lm_head(feature))


AutoConfig.register(Eagle3SpeculatorConfig.model_type, Eagle3SpeculatorConfig)
AutoModel.register(Eagle3SpeculatorConfig, Eagle3Speculator)
