"""The reference steps: one of speculative decoding and one of training, without anything that makes them fast.

Nothing else imports this file. It is here to be read, and tests hold the engine and the loop against it: texts,
drafts and accepted counts are equal, and losses and gradients are so up to rounding. `docs/explanation/step.md`
explains both steps, and names the fast code of each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import DynamicCache, PreTrainedModel

from speculator.decoding.sampling import gumbel

Document = tuple[Tensor, Tensor]
"""Tokens [L] of a document, and which of them the target would have generated, [L] bool."""


@torch.no_grad()
def decode(
    model: PreTrainedModel, head: Any, prompt: Sequence[int], new: int, depth: int, temperature: float, seed: int
) -> tuple[list[int], list[tuple[list[int], int]]]:
    """Continue a prompt by `new` tokens; return them, and each step's draft with its number of accepted tokens.

    `depth` is at most `head.n_predict`. End of text, top-k and top-p are left out.
    """
    cache = DynamicCache(config=model.config)

    def read(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:  # [T, V], [T, D]
        # logits[j] are of the token after tokens[j]: the model sees the cache, and tokens 0 .. j.
        out = model(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True)
        return out.logits[0], read_by_head(out.hidden_states, head)

    def choose(logits: Tensor, position: int) -> int:  # [V]
        # A sample is the largest logit after Gumbel noise is added. The noise [V] is a function of the seed and of the
        # position of the token to choose, so the draft and the target add the same one, and agree often: this is the
        # accept rule `match`.
        noise = gumbel(torch.tensor(seed), torch.tensor(position), len(logits)) if temperature else 0
        return int((logits / (temperature or 1) + noise).argmax())

    logits, hidden = read(prompt)
    text = [*prompt, choose(logits[-1], len(prompt))]
    steps = []
    while len(text) < len(prompt) + new:
        # 1. Draft. The last token of the text is pending: chosen, but not read by the target. hidden[t] is the state
        # after x[t], and the head reads it with x[t+1]. Its step i at the last t drafts the token after draft[:i].
        draft: list[int] = []
        for i in range(depth):
            # head.logits returns [N, B, S, V]: we take step i at the last position, and later steps read padding.
            tokens = [*text[1:], *draft, *[0] * (head.n_predict - 1 - i)]
            logits = head.logits(hidden[None], torch.tensor([tokens]))[i, 0, -1]
            draft.append(choose(logits, len(text) + i))
        # 2. Verify. One forward pass over the pending token and the draft.
        logits, states = read([text[-1], *draft])
        # 3. Accept. logits[i] are the target's of the place where draft[i] stands. Keep what it would have chosen too.
        accepted = 0
        while accepted < depth and draft[accepted] == choose(logits[accepted], len(text) + accepted):
            accepted += 1
        # The target's own token after the accepted ones: instead of the first rejected one, or on top of all.
        own = choose(logits[accepted], len(text) + accepted)
        # 4. Commit. The pending token and the accepted ones stay in the cache; `own` is pending now.
        if accepted < depth:
            cache.crop(accepted - depth)  # a negative number n removes the last |n| tokens: the rejected ones
        hidden = torch.cat([hidden, states[: accepted + 1]])
        text += [*draft[:accepted], own]
        steps.append((draft, accepted))
    return text[len(prompt) : len(prompt) + new], steps


def read_by_head(hidden_states: Sequence[Tensor], head: Any) -> Tensor:  # n + 1 times [1, T, D] -> [T, D or nD]
    """Return what a head reads: the last hidden state, or those of its auxiliary layers side by side.

    hidden_states[k] is the state after k layers: with k = 0 the output of the embedding, and the last one after the
    final norm.
    """
    return torch.cat([hidden_states[k][0] for k in head.aux_layers or [-1]], -1)


def labels(has_loss: Tensor, t: int, steps: int) -> Iterator[tuple[int, int]]:  # [L] bool
    """Yield (i, t + 2 + i) for each step i at position t that has a label: the step, and the label's position.

    Step i reads the target's state at t and the tokens x[t+1] to x[t+1+i]. A decoder drafts after tokens of the target
    alone, so x[t+1] to the label must all have loss: a draft ends before the first token without loss, and at the
    document's end.
    """
    for i in range(steps):
        if t + 2 + i >= len(has_loss) or not has_loss[t + 1 : t + 3 + i].all():
            return
        yield i, t + 2 + i


def loss_of(logits: Tensor, teacher: Tensor, label: Tensor, cross_entropy: float) -> Tensor:  # [V], [V], [] -> []
    """Return KL(p || q) plus `cross_entropy` times the label's cross-entropy under q.

    p is the softmax of `teacher`, the target's logits, and q that of `logits`, the head's.
    """
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum() - cross_entropy * log_q[label]


def update(head: Any, optimizer: torch.optim.Optimizer, losses: list[Tensor], max_norm: float) -> float:
    """Take an optimiser step, and return the loss: the mean over all labels, times the number of draft positions.

    `losses` has a scalar for each label; gradients are clipped to the norm `max_norm`. If the draft positions have
    equally many labels, the result is the sum of their mean losses.
    """
    loss = head.n_predict * torch.stack(losses).sum() / len(losses)
    loss.backward()
    clip_grad_norm_(head.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def mlp_step(
    model: PreTrainedModel,
    head: Any,
    documents: Sequence[Document],
    optimizer: torch.optim.Optimizer,
    max_norm: float = 1.0,
    cross_entropy: float = 0.0,
) -> float:
    """Train an MLP head with the default options for one step, and return the loss."""
    losses = []
    for tokens, has_loss in documents:
        with torch.no_grad():  # the target is frozen
            out = model(tokens[None], output_hidden_states=True)
        hidden, logits = out.hidden_states[-1][0], out.logits[0]
        for t in range(len(tokens)):
            state = F.rms_norm(hidden[t], hidden[t].shape) / sqrt(2)
            for i, at in labels(has_loss, t, head.n_predict):
                # Tied weights: every step uses emb[0], ln[0] and head[0]. Step 0 uses proj[0], later ones proj[1].
                token = head.emb[0](tokens[at - 1])
                state = F.gelu(head.ln[0](head.proj[min(i, 1)](state) + head.alpha * token))
                # The target's logits of x[at] are those after x[at-1].
                losses.append(loss_of(head.head[0](state), logits[at - 1], tokens[at], cross_entropy))
    return update(head, optimizer, losses, max_norm)


def eagle3_step(
    model: PreTrainedModel,
    head: Any,
    documents: Sequence[Document],
    optimizer: torch.optim.Optimizer,
    max_norm: float = 1.0,
    cross_entropy: float = 0.0,
) -> float:
    """Train an EAGLE-3 head with the default options for one step, and return the loss.

    All weights of the head are trained, `lm_head` included. The embedding is the target's, and frozen. Gradients run
    through g, and through the keys and values of the text and of earlier steps.
    """
    layer, attention, config, losses = head.layers[0], head.layers[0].self_attn, head.config, []

    def heads(projection: Any, u: Tensor) -> Tensor:  # [2D] -> [H or K, d]
        return projection(u).view(-1, config.head_dim)

    def rope(x: Tensor, position: int) -> Tensor:  # [heads, d]
        pairs = torch.arange(config.head_dim // 2) * 2 / config.head_dim
        angle = position / config.rope_parameters["rope_theta"] ** pairs
        left, right = x.chunk(2, -1)  # dimension i turns with i + d/2
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)

    def enter(token: Tensor, g: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        u = torch.cat([layer.input_layernorm(head.embed(token)), layer.hidden_norm(g)])
        key = rope(heads(attention.k_proj, u), position)
        return rope(heads(attention.q_proj, u), position), key, heads(attention.v_proj, u)

    def attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:  # [H, d], n x [K, d] -> [H d]
        shared = len(query) // config.num_key_value_heads  # neighbouring heads share a key and a value
        k, v = (torch.stack(x).repeat_interleave(shared, 1) for x in (keys, values))  # [n, H, d]
        weights = torch.einsum("hd,nhd->hn", query, k / sqrt(config.head_dim)).softmax(-1)
        return torch.einsum("hn,nhd->hd", weights, v).flatten()

    for tokens, has_loss in documents:
        with torch.no_grad():
            out = model(tokens[None], output_hidden_states=True)
        logits, parts = out.logits[0], read_by_head(out.hidden_states, head).chunk(len(head.fc_norm), -1)
        fused = head.fc(torch.cat([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], -1))
        # Position t of the text is read with the token after it, so the last one can't be.
        text = [enter(tokens[t + 1], fused[t], t) for t in range(len(tokens) - 1)]
        for t in range(len(tokens)):
            # Step i sees the text up to t, then its own steps 1 to i. g is the state that it continues.
            keys, values, g = [k for _, k, _ in text[: t + 1]], [v for _, _, v in text[: t + 1]], fused[t]
            for i, at in labels(has_loss, t, head.n_predict):
                query, key, value = enter(tokens[at - 1], g, t + i)
                if i:
                    keys, values = [*keys, key], [*values, value]
                h = g + attention.o_proj(attend(query, keys, values))
                # The next step continues the state after the norm (`norm_output`), as in EAGLE-3.1.
                g = head.norm(h + layer.mlp(layer.post_attention_layernorm(h)))
                losses.append(loss_of(head.lm_head(g), logits[at - 1], tokens[at], cross_entropy))
    return update(head, optimizer, losses, max_norm)
