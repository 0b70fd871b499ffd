"""The page `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from speculator.decoding.request import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server.

    Args:
        gauges: (description, function that returns the value) of each gauge, by name without "speculator_".
    """

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "speculator_requests", "HTTP requests by path and status", ("path", "status"), registry=registry
        )
        self.answers = Counter("speculator_answers", "Answers by finish reason", ("finish_reason",), registry=registry)
        self.prompt_tokens = Counter("speculator_prompt_tokens", "Prompt tokens", registry=registry)
        self.new_tokens = Counter("speculator_new_tokens", "Generated tokens", registry=registry)
        self.first_token = Histogram(
            "speculator_time_to_first_token_seconds",
            "Seconds from a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "speculator_request_seconds",
            "Seconds from a request to the end of its answer",
            buckets=_SECONDS,
            registry=registry,
        )
        self.acceptance_length = Histogram(
            "speculator_acceptance_length",
            "Tokens per verification step, the bonus token included; the mean is sum over count",
            buckets=range(1, 18),
            registry=registry,
        )
        self._accepted = Counter(
            "speculator_accepted",
            "Steps that accepted the draft token at this position; divide by the position before it, or by all steps "
            "at position 0, for the acceptance rate",
            ("position",),
            registry=registry,
        )
        for name, (description, value) in gauges.items():
            Gauge(f"speculator_{name}", description, registry=registry).set_function(value)

    def count_answer(self, request: Request) -> None:
        """Count a finished or cancelled answer, its new tokens and its verification steps."""
        self.answers.labels(request.finish_reason).inc()
        self.new_tokens.inc(len(request.tokens))
        for step in request.steps:
            if not step.cut:
                self.acceptance_length.observe(step.accepted + 1)
                for position in range(step.accepted):
                    self._accepted.labels(position).inc()

    def page(self) -> bytes:
        """Return the page as UTF-8 text."""
        return generate_latest(self._registry)


@dataclass
class Traffic:
    """What the engine did since the last line of the server's log.

    Attributes:
        answers: finished answers.
        tokens: new tokens, those of prefills included.
        steps: verification steps, one per request and step of the engine.
        accepted: tokens of verification steps, the bonus tokens included.
    """

    answers: int = 0
    tokens: int = 0
    steps: int = 0
    accepted: int = 0

    def count(self, request: Request, new: int) -> None:
        """Count a step in which a request got `new` tokens."""
        self.answers += request.finish_reason is not None
        self.tokens += new
        # The prefill's token is no step: with it, the request has no other tokens yet.
        if request.num_new > new:
            self.steps += 1
            self.accepted += new

    def line(self, seconds: float, decoding: int, waiting: int) -> str:
        """Return a line for the log about the last `seconds`; "" without new tokens and without requests in slots.

        Args:
            seconds: time in which this traffic was counted.
            decoding: number of requests in slots now.
            waiting: number of requests that wait for a slot now.
        """
        if not self.tokens and not decoding:
            return ""
        parts = [
            f"{decoding} requests decoding, {waiting} waiting, {self.answers} answered",
            f"{self.tokens / seconds:,.1f} tokens/s",
            *([f"acceptance length {self.accepted / self.steps:.2f}"] if self.steps else []),
        ]
        return ", ".join(parts)


class CountRequests:
    """ASGI middleware that calls `count` with the path and the status of every answer."""

    def __init__(self, app: Any, count: Callable[[str, int], None]):
        self._app, self._count = app, count

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        started = False

        async def counting_send(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        except Exception:  # answered with 500 further out
            if not started and scope["type"] == "http":
                self._count(scope["path"], 500)
            raise
