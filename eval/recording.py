"""An engine that records what it drafts, accepts and computes, one prompt after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Drafter
from speculator.decoding.engine import Engine, Verified
from speculator.decoding.request import Request
from speculator.decoding.rows import Batch
from speculator.decoding.sampling import Noise, Sampling
from speculator.target.model import Target


class RecordingEngine(Engine):
    """Decodes one prompt at a time; `newest` is the last verification's draft and result, None before the first."""

    newest: tuple[Draft, Verified] | None = None

    def __init__(self, target: Target, drafter: Drafter | None, rule: str | None = None):
        super().__init__(target, drafter, slots=1, rule=rule, capture=False)
        self._logits: list[Tensor] = []

    def decode(self, prompt: list[int], sampling: Sampling | None = None, **settings: Any) -> Request:
        """Decode one prompt, with the settings of `Engine.request`, and return the finished request."""
        self._logits = []
        request = self.submit(prompt, sampling, logprobs=0, **settings)  # so that steps keep their logits
        self.run()
        request.check()
        return request

    @property
    def logits(self) -> Tensor:  # [S, V]
        """The target's logits of the last prompt; new token i was chosen from row i."""
        return torch.cat(self._logits)

    def start_decoding(self, requests: dict[int, Request], hidden: Tensor) -> None:
        self._logits.append(self.target.logits(hidden))
        super().start_decoding(requests, hidden)

    def verify(self, batch: Batch, draft: Draft, noise: Noise) -> Verified:
        verified = super().verify(batch, draft, noise)
        self.newest = draft, verified
        assert verified.kept is not None
        self._logits.append(verified.kept[0, : 1 + verified.accepted[0]])
        return verified


def recorded_steps(
    target: Target, drafter: Drafter, prompt: list[int], sampling: Sampling, count: int
) -> Iterator[tuple[Draft, Verified]]:
    """Decode up to `count` drafted steps after a prompt, until the context ends; yield each one's draft and result."""
    engine = RecordingEngine(target, drafter)
    most = count * (drafter.num_speculative_tokens + 1) + 1
    request = engine.submit(prompt, sampling, logprobs=0, max_new_tokens=most, eos_token_ids=())
    while count and not request.finish_reason:
        engine.newest = None
        engine.step()
        if engine.newest is not None:
            count -= 1
            yield engine.newest
    request.cancel()
    request.check()
