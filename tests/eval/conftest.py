"""A report's figures without what takes most of a tiny evaluation's time."""

import pytest


@pytest.fixture
def figures_only(monkeypatch):
    """Reports of no pages and plots, with few resamples and timings: for tests that read the rows alone."""
    monkeypatch.setattr("eval.run.render", lambda *_: None)
    monkeypatch.setattr("eval.run.trace_suite", lambda *_: [])
    few_timings(monkeypatch)


@pytest.fixture
def quick(monkeypatch):
    """Whole reports, whose intervals and costs are less precise."""
    few_timings(monkeypatch)


def few_timings(monkeypatch) -> None:
    monkeypatch.setattr("eval.metrics._RESAMPLES", 100)
    monkeypatch.setattr("eval.decoders._COST_BLOCKS", 2)
