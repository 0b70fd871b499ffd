"""Prefill: a chunk of the waiting prompts goes through the target, and complete prompts get their first new token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculator.decoding.draft import Draft, take_at
from speculator.decoding.drafter import Drafter, Sequences
from speculator.decoding.logprobs import TokenLogprobs, token_logprobs
from speculator.decoding.request import Request, max_logprobs, suppressed
from speculator.decoding.sampling import Noise, RowSampling, Suppressed
from speculator.target.cache.kv_cache import KVCache
from speculator.target.model import Target


@dataclass
class Chunk:
    """Prompt tokens that one forward pass processes, of neighbouring rows.

    Attributes:
        sequences: each row's prompt; of a preempted request, its completion too.
        begins: tokens of each sequence that are in the cache.
        counts: tokens of each sequence in the chunk.
    """

    start: int
    sequences: Sequences
    begins: list[int]
    counts: list[int]


def process(chunk: Chunk, target: Target, cache: KVCache, drafter: Drafter | None) -> Tensor:  # [R, D]
    """Run the target over a chunk and pass its states to the drafter; return each row's last hidden state."""
    # Left-aligned, and padded on the right: rows [3 1 4] and [9] become [[3 1 4] [9 0 0]], with the counts 3 and 1.
    width, device = max(chunk.counts), target.device
    parts = [text[n : n + count] for text, n, count in zip(chunk.sequences, chunk.begins, chunk.counts, strict=True)]
    tokens = torch.tensor([[*part, *[0] * (width - len(part))] for part in parts], device=device)
    counts = torch.tensor(chunk.counts, device=device)
    cache.select(chunk.start, chunk.start + len(parts), max(chunk.begins))
    # A reused slot may hold more tokens than the prompt shares with it: of 100 cached tokens with 64 shared, 36 go.
    cache.truncate(torch.tensor(chunk.begins))
    cache.read_sources(chunk.sequences)
    with target.aux_layers.recorded(drafter.aux_layers if drafter else ()) as states:
        hidden = target.extend(cache, tokens, counts=chunk.counts)
    # Padding is not committed, so the next chunk overwrites it.
    cache.commit(counts)
    if drafter:
        drafter.memory.prefill(chunk.start, chunk.sequences, chunk.begins, states(hidden), chunk.counts)
    return take_at(hidden, counts - 1)


def first_tokens(
    target: Target,
    requests: Sequence[Request],
    hidden: Tensor,  # [R, D] of the last token of each request's sequence
) -> tuple[Tensor, list[bool], dict[int, list[TokenLogprobs]]]:  # [R]
    """Sample each request's next token; return the tokens, whether logits are finite, and log-probabilities by row."""
    logits = target.logits(hidden)
    lengths = torch.tensor([len(request.sequence) for request in requests], device=hidden.device)
    # Coupled, whatever the rule: the token at position `lengths` has the noise of that position in a plain step too.
    sampling = RowSampling([request.sampling for request in requests], hidden.device)
    noise = Noise(sampling, lengths, target.vocab_size, 0, coupled=True)
    allowed = logits[:, None]
    if early := suppressed(requests):
        ends = Suppressed(len(requests), target.vocab_size, hidden.device)
        ends.put(early)
        allowed = ends.removed(allowed, torch.zeros_like(lengths)[:, None])
    first = noise.samples(allowed, Draft.none(lengths))[:, 0]
    # A logit that is not finite is the largest of its row, or all are NaN: the chosen token's shows both.
    finite = logits.gather(1, first[:, None])[:, 0].isfinite().tolist()
    asked = [row for row, request in enumerate(requests) if request.logprobs is not None]
    if (num_top := max_logprobs(requests)) is None:
        return first, finite, {}
    found = token_logprobs(logits[asked, None], first[asked, None], num_top)
    return first, finite, dict(zip(asked, found, strict=True))
