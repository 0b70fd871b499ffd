"""What `/metrics` shows, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from speculator.decoding.request import Request

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The counters of one server.

    Args:
        gauges: of each name what it shows, and who tells its value.
    """

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "speculator_requests", "Requests by path and status", ("path", "status"), registry=registry
        )
        self.answers = Counter("speculator_answers", "Answers by how they ended", ("finish_reason",), registry=registry)
        self.prompt_tokens = Counter("speculator_prompt_tokens", "Tokens of prompts", registry=registry)
        self.new_tokens = Counter("speculator_new_tokens", "Tokens of answers", registry=registry)
        self.first_token = Histogram(
            "speculator_time_to_first_token_seconds",
            "From a request to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.whole = Histogram(
            "speculator_request_seconds", "From a request to the end of its answer", buckets=_SECONDS, registry=registry
        )
        self.acceptance_length = Histogram(
            "speculator_acceptance_length",
            "Tokens that a step gave a row: the accepted ones and one more. The sum over the count is the mean",
            buckets=range(1, 18),
            registry=registry,
        )
        self._accepted = Counter(
            "speculator_accepted",
            "Steps that accepted the drafted token at this position; those at the position before, or all steps at "
            "the first, are what to divide by",
            ("position",),
            registry=registry,
        )
        for name, (text, value) in gauges.items():
            Gauge(f"speculator_{name}", text, registry=registry).set_function(value)

    def ended(self, request: Request) -> None:
        """Count an answer that has ended."""
        self.answers.labels(request.finish_reason).inc()
        self.new_tokens.inc(len(request.tokens))
        for step in request.steps:
            if not step.cut:
                self.acceptance_length.observe(step.accepted + 1)
                for position in range(step.accepted):
                    self._accepted.labels(position).inc()

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)
