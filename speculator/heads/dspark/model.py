"""DSpark (arXiv 2607.05147): a block of tokens drafted in one pass, and a bias by the token before each.

DFlash (2602.06036) is a DSpark head without the bias. DFlash 2 adds the parts in `dflash2.py` to DFlash.

With a the position of an anchor (the newest token of the text) and G the number of drafted tokens:

    c[t] = rms(fc(cat(aux_hidden at t)); hidden_norm)       for the positions t < a of the text
    h    = embed([x[a], MASK, .., MASK])                    slot j has rope position a + j
    h    = h + o_proj(attention(q(y), k([c ; y]), v([c ; y]))),  y = rms(h; input_layernorm)
    h    = h + down(silu(gate(z)) * up(z)),                      z = rms(h; post_attention_layernorm)
    U    = lm_head(rms(h; norm))                            the target's own, as is the embedding
    logits of x[a+k] = U[k] + markov_w2(markov_w1[x[a+k-1]])
    confidence       = w [h[k] ; markov_w1[x[a+k-1]]] + b   the logit of the chance that x[a+k] is accepted

Each of the layers is one of Qwen 3; c goes to all of them as it is. A slot attends to the whole block (`is_causal`: to
the slots up to itself). With a `sliding_window` W, the slot at position p attends to those above p - W. U[k] is
that of slot k - 1 (`sample_from_anchor`) or of slot k. For G = 3:

    slot                     0       1       2       3
    input                    x[a]    MASK    MASK    MASK
    sample_from_anchor       x[a+1]  x[a+2]  x[a+3]
    else (DFlash)            -       x[a+1]  x[a+2]  x[a+3]

The training form, blocks at many anchors of a text, comes first, then the drafting form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from speculator.decoding.drafter import Sequences, Shape
from speculator.device import send
from speculator.heads.attention.base import (
    MLP,
    Attention,
    AttentionHead,
    Norm,
    Rope,
    attend,
    default_aux_layers,
    narrowed,
)
from speculator.heads.attention.cache import HeadCache
from speculator.heads.attention.cached_source import CachedSource
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.dflash2 import CandidateSelector, Convolution
from speculator.heads.target_matrices import HeadOnTargetMatrices
from speculator.heads.training import IGNORE, Drafts, Metric, TokenLoss, TrainingBatch, step_metrics
from speculator.heads.unrolled import draft_ids
from speculator.target.cache.kv_cache import KVCache, aligned, bucketed

_SCORES = {"cpu": 2**20}
_SCORES_ON_GPU = 2**26
"""Attention scores that are computed at a time in training, by kind of device."""
_LEAST_SPAN = 256
"""Smallest number of text positions that a chunk of blocks reads on a GPU, and what the text is padded to."""
KeyValue = tuple[Tensor, Tensor]


class BlockLayer(nn.Module):
    """A layer of Qwen 3, with a convolution around attention and around the MLP if `conv_group_size` is set."""

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__()
        self.input_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.emb_dim, config.rms_norm_eps)
        self.self_attn = Attention(config, config.emb_dim, bias=False, qk_norm=True)
        self.mlp = MLP(config)
        self.attention_conv = Convolution(config) if config.conv_group_size else None
        self.mlp_conv = Convolution(config) if config.conv_group_size else None

    def forward(
        self,
        h: Tensor,  # [..., block_size, D] the states of blocks
        rope: tuple[Tensor, Tensor],
        attended: Callable[[Tensor, Tensor, Tensor], Tensor],  # queries, keys and values of the slots -> [..., H, d]
    ) -> Tensor:  # [..., block_size, D]
        def attention(y: Tensor) -> Tensor:
            query, (keys, values) = self.self_attn.query(y, rope), self.self_attn.key_value(y, rope)
            return self.self_attn.o_proj(attended(query, keys, values).flatten(-2))

        h = h + convolved(self.attention_conv, narrowed(self.input_layernorm(h)), attention)
        return h + convolved(self.mlp_conv, narrowed(self.post_attention_layernorm(h)), self.mlp)


def convolved(convolution: Convolution | None, y: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a sublayer to its normed input [..., block_size, D], inside the convolution if there is one."""
    return sublayer(y) if convolution is None else convolution(y, sublayer)


class MarkovHead(nn.Module):
    """A bias of the next token's logits by the token before it, of low rank."""

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.output_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [...] -> [..., V_d]
        return self.markov_w2(self.markov_w1(tokens))


class ConfidenceHead(nn.Module):
    """Projection of a slot's final state and, if there is a Markov head, its embedding of the token before: a logit."""

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__()
        self.proj = nn.Linear(config.emb_dim + config.markov_rank, 1)


class DSparkSpeculator(HeadOnTargetMatrices, AttentionHead):
    """Attention layers that draft a block in one pass; module names follow the `dspark` layout."""

    config_class = DSparkSpeculatorConfig
    config: DSparkSpeculatorConfig

    layers: Any  # of `BlockLayer`
    markov_head: Any
    confidence_head: Any
    candidate_selector: Any

    def __init__(self, config: DSparkSpeculatorConfig):
        super().__init__(config)
        size = config.emb_dim
        self.fc = nn.Linear(config.num_aux_layers * size, size, bias=False)
        self.hidden_norm = Norm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.rope = Rope(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MarkovHead):
            nn.init.zeros_(module.markov_w2.weight)
        elif isinstance(module, Convolution):  # the identity
            module.base_kernel[:, 0], module.base_kernel[:, 1] = 1, 0
            nn.init.zeros_(module.kernel_projection.weight)
        elif isinstance(module, CandidateSelector):  # scores are the slots' logits
            nn.init.normal_(module.predecessor_codebook)
            nn.init.zeros_(module.successor_codebook)

    def token_matrices(self) -> list[Tensor]:
        own = [] if self.markov_head is None else [self.markov_head.markov_w2.weight]
        if self.candidate_selector is not None:
            own += [self.candidate_selector.predecessor_codebook, self.candidate_selector.successor_codebook]
        return [*super().token_matrices(), *own]

    def weights_per_token(self, length: int) -> int:
        text = self.fc.weight.numel()
        layers = sum(part.weight.numel() for part in self.layers.modules() if isinstance(part, nn.Linear))
        for layer in self.layers:
            text += layer.self_attn.k_proj.weight.numel() + layer.self_attn.v_proj.weight.numel()
        # The output matrix has no gradient: two products instead of three. Candidates take one more.
        products = 2 if self.candidate_selector is None else 3
        output = self.config.output_size * (products * self.config.emb_dim // 3 + self.config.markov_rank)
        output += self.config.selector_rank * self.config.emb_dim
        predicting = self.n_predict / self.config.block_size  # the others of a block's slots have no logits
        return text + round(self.config.slots_per_token(length) * (layers + predicting * output))

    def drafting_source(self) -> DSparkSource:
        return DSparkSource(self)

    # --- what it shares with its target

    def bind(self, target: PreTrainedConfig, embedding: Tensor, output: nn.Linear) -> None:
        self.config.aux_layers = self.config.aux_layers or default_aux_layers(target.num_hidden_layers)
        self.share(embedding, output)

    # --- what both forms compute

    def context(self, aux_hidden: Tensor) -> Tensor:  # [..., nD] -> [..., D]
        """Compute c (see the module): the states of the text that every layer attends to."""
        return self.hidden_norm(self.fc(aux_hidden))

    def key_values(self, context: Tensor, positions: Tensor) -> list[KeyValue]:  # [..., D], [...]
        """Compute each layer's keys, with rope, and values of the text, [..., K, d] both; `context` is c."""
        rope = self.rope(positions, context.dtype)
        return [layer.self_attn.key_value(context, rope) for layer in self.layers]

    def block(self, anchors: Tensor) -> Tensor:  # [...] token ids -> [..., block_size, D]
        """Embed the slots of blocks that begin with these tokens: each anchor, then masks."""
        # x[a] MASK MASK .., as in the table of the module; cloned, since an expanded tensor can't be written to.
        slots = anchors[..., None].expand(*anchors.shape, self.config.block_size).clone()
        slots[..., 1:].fill_(self.config.mask_token_id)
        return self.embed(slots)

    def confidence_logits(self, features: Tensor, tokens: Tensor) -> Tensor:  # [..., D], [...] -> [...]
        """Return the logit of the chance that what `features` draft after each of `tokens` is accepted."""
        if self.markov_head is not None:
            features = torch.cat([features, self.markov_head.markov_w1(tokens)], -1)
        return self.confidence_head.proj(features)[..., 0]

    def conditioned(self, features: Tensor, logits: Tensor, before: Tensor) -> Tensor:  # -> [..., V]
        """Return logits after the tokens `before` [...], from slots' features [..., D] and logits [..., V_d]."""
        if self.markov_head is not None:
            logits = logits + self.markov_head(before)
        elif self.candidate_selector is not None:
            logits = self.candidate_selector(features, logits, before)
        return self.to_full_vocabulary(logits)

    def drafting_slots(self, h: Tensor) -> Tensor:  # [..., block_size, D] -> [..., G, D]
        # All G slots with `sample_from_anchor`, else the last G of G + 1: the anchor's drafts nothing.
        return self.norm(h[..., self.config.block_size - self.n_predict :, :])

    # --- training: blocks at many anchors of a text

    def blocks(
        self,
        states: Tensor,  # [B, S, nD] auxiliary hidden states
        tokens: Tensor,  # [B, S]
        rows: Tensor,  # [n] row of each anchor, ascending; this and the next two are on the CPU
        anchors: Tensor,  # [n] position of each anchor in its row, ascending within the row
        starts: Tensor,  # [n] first position of each anchor's document
    ) -> Tensor:  # [n, G, D]
        """Compute what the output matrix reads in every slot that predicts a token."""
        device, size = tokens.device, self.config.block_size
        context, length = self.context(states), tokens.shape[1]
        # On a GPU shapes are few: numbers of blocks in a chunk, and of positions that it reads, are powers of two.
        few = device.type not in _SCORES
        if few:
            context = nn.functional.pad(context, (0, 0, 0, -length % _LEAST_SPAN))
            length = context.shape[1]
        # Keys and values of the text are computed once per row; the blocks at all its anchors read them.
        text = self.key_values(context, torch.arange(length, device=device).expand(context.shape[:2]))
        # A chunk of C blocks has H * (C * size) * T scores: this many blocks fit the budget.
        most = _SCORES.get(device.type, _SCORES_ON_GPU) // (self.config.num_attention_heads * length * size)
        most = max(1, most)
        if few:
            most = 1 << most.bit_length() - 1
        made, at, first = [], anchors.tolist(), starts.tolist()
        # Blocks come sorted by their rows: blocks begin..end-1 belong to row `row`.
        ends = rows.bincount(minlength=len(tokens)).cumsum(0).tolist()
        for row, (begin, end) in enumerate(pairwise([0, *ends])):
            own = [(key[row], value[row]) for key, value in text]
            for start in range(begin, end, most):
                stop = min(start + most, end)
                last = at[stop - 1]
                # From the first document's start to the last anchor, exclusive: a block at anchor a attends to the text
                # before a, and reads x[a] itself as its slot 0. The window of the first block reaches back furthest.
                span = slice(max(first[start], at[start] + 1 - (self.config.sliding_window or length + size)), last)
                chunk = torch.arange(start, stop)
                if few:
                    # Widths and numbers of blocks are powers of two, so that attention has few shapes; the mask hides
                    # what is too much.
                    width = min(max(_LEAST_SPAN, 1 << (last - span.start - 1).bit_length()), length)
                    span = slice(max(0, last - width), max(last, width))
                    more = (1 << (stop - start - 1).bit_length()) - (stop - start)
                    chunk = torch.cat([chunk, chunk[-1:].expand(more)])  # the last block again
                given = (send(x[chunk], device) for x in (starts, anchors))
                made.append(self._chunk(tokens[row], own, span, *given)[: stop - start])
        return torch.cat(made)

    def _chunk(
        self,
        tokens: Tensor,  # [S]
        text: list[KeyValue],  # of each layer, [S, K, d] both
        span: slice,  # positions of the text that the blocks read
        starts: Tensor,  # [C]
        anchors: Tensor,  # [C]
    ) -> Tensor:  # [C, G, D]
        """Compute the blocks at C anchors of one row, in one attention over the text and all of the blocks."""
        count, size = len(anchors), self.config.block_size
        text_positions = torch.arange(span.start, span.stop, device=tokens.device)
        # Query rows are (block, slot) pairs, block by block. For 2 blocks of 3 slots: slots 0 1 2 0 1 2, blocks 0 0 0 1
        # 1 1. Layers take them as [C, size].
        slots = torch.arange(size, device=tokens.device).repeat(count)
        blocks = torch.arange(count, device=tokens.device).repeat_interleave(size)
        # Slot j of the block at anchor a stands for position a + j: for a = 7 the slots have the rope of 7, 8, 9.
        positions = anchors[blocks] + slots
        # The text before the anchor, from the start of the anchor's document.
        seen_text = (text_positions < anchors[blocks, None]) & (text_positions >= starts[blocks, None])  # [C * size, T]
        if self.config.sliding_window is not None:
            seen_text &= text_positions > positions[:, None] - self.config.sliding_window
        # Blocks of one text don't see each other: each is a draft of its own.
        seen_block = blocks[:, None] == blocks
        if self.config.is_causal:
            seen_block &= slots[:, None] >= slots
        seen = torch.cat([seen_text, seen_block], 1)[None]  # [1, C * size, T + C * size]
        rope = self.rope(positions.view(count, size), self.dtype)
        h = self.block(tokens[anchors])  # [C, size, D]
        for layer, (text_keys, text_values) in zip(self.layers, text, strict=True):

            def attended(
                query: Tensor, key: Tensor, value: Tensor, before: KeyValue = (text_keys[span], text_values[span])
            ) -> Tensor:
                # One softmax over text and block: the mask has the columns of the text first, then those of all blocks
                # of the chunk.
                keys, values = (
                    torch.cat([x, own.flatten(0, 1)]).transpose(0, 1)[None]
                    for x, own in zip(before, (key, value), strict=True)
                )
                return attend(query.flatten(0, 1)[None], keys, values, seen)[0].unflatten(0, (count, size))

            h = layer(h, rope, attended)
        return self.drafting_slots(h)

    def forward(self, batch: TrainingBatch, loss: TokenLoss) -> dict[str, Metric]:
        device, length = batch.input_ids.device, batch.input_ids.shape[1]
        # All indices are worked out on the host: their numbers would have to be waited for on a GPU.
        host = batch.targets["on_host"]
        # A block without a first label has none at all: a draft ends where its first token has no loss.
        trained = (host.labels[..., 0] != IGNORE).nonzero()
        if not len(trained):
            trained = trained.new_zeros(1, 2)  # DDP needs a gradient for every weight
        rows, columns = trained.T
        # [n] anchors and document starts, and [n, G] labels of the n blocks that are trained.
        anchors, starts, labels = (x[rows, columns] for x in (host.anchors, host.starts, host.labels))  # [n, G]
        features = self.blocks(batch.states, batch.input_ids, rows, anchors, starts)
        # Token k of the block at anchor a is x[a+k+1], which the target predicts from h[a+k]. For a = 7 and G = 3 the
        # states are h7, h8, h9 and the labels x8, x9, x10.
        positions = anchors[:, None] + torch.arange(self.n_predict)
        positions = positions.clamp_max(length - 1)  # beyond the row there is no label
        # Slots that predict the same token, side by side: the target's distribution is computed once for them.
        live = (labels != IGNORE).flatten().nonzero()[:, 0]
        # Index into the flattened [B * L] states: row 1's h7 in rows of 100 tokens is 107.
        predictors = (rows[:, None] * length + positions).flatten()[live]
        predictors, order = predictors.sort()
        live = live[order]
        # Columns from a block's first label to its last, among them those of blocks that overlap it.
        columns, blocks = torch.arange(len(live)), live // self.n_predict
        first = columns.new_full((len(labels),), len(live)).scatter_reduce(0, blocks, columns, "amin")
        last = columns.new_zeros(len(labels)).scatter_reduce(0, blocks, columns, "amax")
        reach = max(0, int((last - first).max()))
        weights = loss.step_weights(self.n_predict).expand(labels.shape).flatten()[live]
        ids, count = labels.flatten()[live], (labels != IGNORE).sum(0)
        live, ids, weights, count = (send(x, device) for x in (live, ids, weights, count))
        # The Markov head reads the token before the label, which is at the predictor's own position: x[a+k].
        before = batch.input_ids.flatten()[send(predictors, device)]
        features = features.flatten(0, 1)[live]
        terms = [(features, self.target_output.weight)]
        if self.markov_head is not None:
            terms.append((self.markov_head.markov_w1(before), self.markov_head.markov_w2.weight))
        ids = draft_ids(ids, self.draft_tokens)[None]
        paced = Drafts(live[None], labels.shape, reach)
        hidden = batch.hidden.flatten(0, 1)
        normalisers = None if batch.normalisers is None else batch.normalisers.flatten()
        measured = loss([terms], ids, hidden, weights[None], self.draft_tokens, predictors, paced, normalisers)

        def by_slot(x: Tensor) -> Tensor:  # [K] -> [G, n]
            # From labels in the order of their predictors back to [G, n], so that prefix products run over one block's
            # tokens.
            return x.new_zeros(labels.numel()).index_copy(0, live, x).view(labels.shape).T

        objective, own_metrics = measured.objective, {}
        hits, overlap = measured.hits[0], None if measured.overlap is None else by_slot(measured.overlap[0])
        if self.candidate_selector is not None:
            selected = self.candidate_selector.measure(features, self.output_logits, before, ids[0])
            objective = objective + (selected.loss * weights).sum()
            recalled = by_slot(selected.recalled).sum(1)
            own_metrics = {
                "slot_accuracy": (by_slot(hits).sum(1), count),
                "candidate_recall": (recalled, count),
                "selector_accuracy": (by_slot(selected.hits).sum(1), recalled),
                "selector_loss": (by_slot(selected.loss.detach()).sum(1), recalled),
            }
            # A draft is what the selector chooses; the loss knows the overlap of the slots alone.
            hits, overlap = selected.hits, None
        if self.confidence_head is not None:
            # The confidence head learns the chance of acceptance: min(p, q) summed, where the loss has computed it, or
            # 0 and 1 by the likeliest token. No gradient flows back through that aim.
            accepted = (measured.hits if measured.overlap is None else measured.overlap)[0]
            error = nn.functional.binary_cross_entropy_with_logits(
                self.confidence_logits(features, before), accepted.to(features.dtype), reduction="none"
            )
            own_metrics["confidence_loss"] = (by_slot(error.detach()).sum(1), count)
            objective = objective + (error * weights).sum()
        drafts, row_of = send(labels[:, 0] != IGNORE, device), send(rows, device)
        metrics = step_metrics(
            by_slot(measured.loss[0]),
            by_slot(hits),
            overlap,
            count,
            drafts,
            lambda x: x.new_zeros(len(batch.input_ids)).index_add(0, row_of, x),
        )
        return {"objective": (objective, count.sum()), **metrics, **own_metrics}

    # --- export

    @torch.no_grad()
    def logits(
        self,
        states: Tensor,  # [B, S, nD]
        tokens: Tensor,  # [B, S + G]
        embedding: Tensor,  # [V, D]
        output: Tensor,  # [V, D]
    ) -> Tensor:  # [B, S, G, V]
        """Compute the teacher-forced logits of the block at every anchor 1..S, with the target's two matrices.

        Entry [b, t, k] predicts tokens[b, t + 2 + k] from the states up to t, tokens[b, t + 1] and, with a Markov head
        or a selector, tokens[b, t + 1 + k].
        """
        with self.sharing(embedding, output):
            count, length = states.shape[:2]
            # Anchor a reads the states before a, so position t of the result is the block at anchor t + 1.
            padded = nn.functional.pad(states, (0, 0, 0, tokens.shape[1] - length))
            anchors = torch.arange(1, length + 1).repeat(count)
            rows = torch.arange(count).repeat_interleave(length)
            features = self.blocks(padded, tokens, rows, anchors, torch.zeros_like(anchors))
            positions = (anchors[:, None] + torch.arange(self.n_predict)).clamp_max(tokens.shape[1] - 1)
            logits = self.conditioned(features, self.output_logits(features), tokens[rows[:, None], positions])
            return logits.unflatten(0, (count, length))

    def probe(self) -> tuple[Tensor, ...]:
        """Return auxiliary hidden states [1, 4, nD], tokens [1, 4 + G], and a matrix [V, D] for the target's, twice."""
        aux_hidden, tokens, matrix = super().probe()
        return aux_hidden, nn.functional.pad(tokens, (0, 1)), matrix, matrix  # also the last state has a block after it


# --- drafting


class DSparkSource(CachedSource):
    """Drafts with a block drafter; keeps each layer's keys and values of every row's text.

    Those of a block come after the text's, and the next write replaces them.
    """

    def __init__(self, head: DSparkSpeculator):
        self.head = head
        self.independent = head.markov_head is None and head.candidate_selector is None
        self._levels = 0  # deepest draft so far
        self._spare = head.config.block_size  # positions that a step may write after a row's text

    def reserve(self, shape: Shape) -> None:
        self._levels = max(self._levels, min(shape.depth, self.head.n_predict))
        # A step writes the pending token and its accepted path, which n-gram lookup may make longer than a block.
        if shape.depth + 1 > self._spare:
            self._spare = shape.depth + 1
            if hasattr(self, "cache"):
                self.grow(self._capacity)

    def open(self, cache: KVCache) -> DSparkSource:
        opened, config = super().open(cache), self.head.config
        size = config.num_key_value_heads, cache.capacity + self._spare, config.head_dim
        opened.cache = HeadCache(config.num_hidden_layers, len(cache.lengths), *size, self.head.fc.weight)
        opened._capacity = cache.capacity
        return opened

    @torch.no_grad()
    def _read(self, cache: HeadCache, hidden: Tensor, counts: Tensor) -> None:  # [B, T, nD], [B]
        """Append text with these auxiliary hidden states to the cache: the first `counts` positions of each row."""
        positions = cache.lengths[:, None] + torch.arange(hidden.shape[1], device=hidden.device)
        context = self.head.context(hidden.to(self.head.dtype))
        for index, (keys, values) in enumerate(self.head.key_values(context, positions)):
            cache.write(index, keys, values, positions)
        cache.lengths += counts

    def read_prompts(
        self, start: int, sequences: Sequences, begins: Sequence[int], hidden: Tensor, counts: Sequence[int]
    ) -> None:
        part = self.cache.select(start, start + len(counts), 0)
        part.lengths.copy_(torch.tensor(begins))
        self._read(part, hidden, torch.tensor(counts, device=hidden.device))

    def commit(self, tokens: Tensor, hidden: Tensor, counts: Tensor) -> None:
        self._read(self.cache.select(0, len(counts), 0), hidden, counts)

    @torch.no_grad()
    def first(self, pending: Tensor, sequences: Sequences) -> Tensor:
        head, size = self.head, self.head.config.block_size
        longest = bucketed(max(map(len, sequences)) - 1, pending.device) + 1  # as the target's cache has it
        cache = self.cache.select(0, len(pending), longest)
        extent = min(aligned(longest + size, pending.device), cache.keys.shape[3])
        slots = torch.arange(size, device=pending.device)
        # Slot j of the block is at position length + j: after 7 tokens of text, the pending token is at 7.
        positions = cache.lengths[:, None] + slots  # [B, size]
        last = slots if head.config.is_causal else slots.new_full((size,), size - 1)
        # All slots see the text and the whole block, or with causal blocks the slots up to their own. What lies beyond
        # is left from an earlier block.
        seen = torch.arange(extent, device=pending.device) <= (cache.lengths[:, None] + last)[..., None]
        if head.config.sliding_window is not None:
            seen &= torch.arange(extent, device=pending.device) > positions[..., None] - head.config.sliding_window
        rope = head.rope(positions, head.dtype)
        h = head.block(pending)
        for index, layer in enumerate(head.layers):

            def attended(query: Tensor, keys: Tensor, values: Tensor, index: int = index) -> Tensor:
                cache.write(index, keys, values, positions)
                return attend(query, cache.keys[index][:, :, :extent], cache.values[index][:, :, :extent], seen)

            h = layer(h, rope, attended)
        # All levels at once; `next` only adds what the token before changes.
        self._slots = head.drafting_slots(h)[:, : self._levels]  # [B, levels, D]
        self._logits = head.output_logits(self._slots)  # [B, levels, V_d]
        return self._after(0, pending[:, None])

    def next(self, level: int, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._after(level, tokens)

    @torch.no_grad()
    def _after(self, level: int, tokens: Tensor) -> Tensor:  # [B, f] -> [B, f, V]
        """Return the logits of the token after each of `tokens`, at depth `level` + 1 of the draft."""
        # Slots don't depend on drafted tokens, so all tokens of a level share one slot: [B, 1, D] and [B, 1, V_d].
        slot = slice(level, level + 1)
        logits = self.head.conditioned(self._slots[:, slot], self._logits[:, slot], tokens)
        return logits.expand(-1, tokens.shape[1], -1)
