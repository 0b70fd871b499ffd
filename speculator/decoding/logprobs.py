"""Log-probabilities of generated tokens under the target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from speculator.device import exact


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token under the target at temperature 1, without filters.

    Attributes:
        logprob: natural logarithm of the generated token's probability.
        top: (token id, log-probability) of the likeliest tokens at its position, the likeliest first.
    """

    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(
    logits: Tensor,  # [R, T, V]
    tokens: Tensor,  # [R, T]
    num_top: int,
) -> list[list[TokenLogprobs]]:
    """Return, by row, the log-probability of each token and of the `num_top` likeliest tokens at its position."""
    # In float32: of 49,152 tokens, bfloat16 would round the sum of the exponentials to two digits.
    logprobs = exact(logits).log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, :, None])[:, :, 0].tolist()
    best = logprobs.topk(min(num_top, logits.shape[-1]))
    columns = zip(chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        [TokenLogprobs(value, list(zip(ids, values, strict=True))) for value, ids, values in zip(*row, strict=True)]
        for row in columns
    ]
