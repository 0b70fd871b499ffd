"""The page `/metrics`, in Prometheus' text format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from speculator.acceptance import Acceptance
from speculator.decoding.request import Request
from speculator.server.errors import APIError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server.

    Args:
        traffic: what the engine has done.
        gauges: (description, function that returns the value) of each gauge, by name without "speculator_".
    """

    def __init__(self, traffic: Traffic, gauges: dict[str, tuple[str, Callable[[], float]]]):
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "speculator_requests", "HTTP requests by path and status", ("path", "status"), registry=registry
        )
        self.answers = Counter("speculator_answers", "Answers by finish reason", ("finish_reason",), registry=registry)
        self.prompt_tokens = Counter("speculator_prompt_tokens", "Prompt tokens", registry=registry)
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
        for name, (description, value) in gauges.items():
            Gauge(f"speculator_{name}", description, registry=registry).set_function(value)
        registry.register(traffic)

    def page(self) -> bytes:
        return generate_latest(self._registry)


@dataclass(eq=False)
class Traffic(Collector):
    """What the engine has done since its start. Its thread counts, so that the event loop need not at an answer's end.

    Attributes:
        tokens: new tokens, those of prefills included.
        acceptance: of verification steps, one per request and step of the engine.
    """

    answers: int = 0
    tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    def count(self, request: Request, new: int) -> None:
        self.answers += request.finish_reason is not None
        self.tokens += new
        # The prefill's token is no step.
        if new and request.steps and not (step := request.steps[-1]).cut:
            self.acceptance.count(step.accepted)

    def since(self, before: Traffic) -> Traffic:
        """Return the traffic after `before`, as a copy that does not change."""
        acceptance = self.acceptance - before.acceptance
        return Traffic(self.answers - before.answers, self.tokens - before.tokens, acceptance)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a registry of Prometheus."""
        now = self.since(Traffic())
        reached, steps = now.acceptance.reached, now.acceptance.steps
        yield CounterMetricFamily("speculator_new_tokens", "Generated tokens", value=now.tokens)
        yield HistogramMetricFamily(
            "speculator_acceptance_length",
            "Tokens per verification step, the bonus token included; the mean is sum over count",
            buckets=[
                *((f"{most}.0", steps - sum(reached[most : most + 1])) for most in range(1, 18)),
                ("+Inf", steps),
            ],
            sum_value=sum(reached),
        )
        accepted = CounterMetricFamily(
            "speculator_accepted",
            "Steps that accepted the draft token at this position; divide by the position before it, or by all steps "
            "at position 0, for the acceptance rate",
            labels=["position"],
        )
        for position, count in enumerate(reached[1:]):
            accepted.add_metric([str(position)], count)
        yield accepted

    def line(self, seconds: float, decoding: int, waiting: int) -> str:
        """Return a log line on the last `seconds` and on requests now; "" if no token is new and none is `decoding`."""
        if not self.tokens and not decoding:
            return ""
        parts = [
            f"{decoding} requests decoding, {waiting} waiting, {self.answers} answered",
            f"{self.tokens / seconds:,.1f} tokens/s",
            *([f"acceptance length {self.acceptance.length:.2f}"] if self.acceptance.steps else []),
        ]
        return ", ".join(parts)


class CountRequests:
    """ASGI middleware that calls `count` with the path and the status of every answer, and ends cancelled requests."""

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
        except asyncio.CancelledError:  # by the end of the server, which has waited long enough
            if scope["type"] != "http":
                raise
            if not started:
                error = APIError("the server ends", status=503)
                await JSONResponse(error.body(), error.status)(scope, receive, counting_send)
        except Exception:  # answered with 500 further out
            if not started and scope["type"] == "http":
                self._count(scope["path"], 500)
            raise
