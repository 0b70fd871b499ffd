"""Decide who writes a target's text: its engine in this process, or the servers that run it."""

from __future__ import annotations

from typing import Any

from data.writers.base import Writer
from data.writers.engine import EngineWriter
from speculator.checkpoints.loading import load_drafter
from speculator.target.base import PromptTarget
from speculator.target.model import Target


def writer_of(target: PromptTarget, batch_size: int, concurrency: int | None = None, **head: Any) -> Writer:
    """Return the writer of a target's text.

    Args:
        target: a `Target`, or one that servers run.
        batch_size: rows that the engine decodes together.
        concurrency: concurrent requests to each server (default: `batch_size`, at least 32).
        head: arguments of `load_drafter` for the head that drafts in this process (default: plain decoding).
    """
    if isinstance(target, Target):
        drafter = load_drafter(target=target, batch_size=batch_size, **head) if head else None
        return EngineWriter(target, drafter, batch_size)
    from data.writers.server import CONCURRENCY, ServerWriter  # imports openai, for a second

    served: Any = target  # a `ServerTarget`, or `TextOnly`
    return ServerWriter(served, concurrency or max(CONCURRENCY, batch_size))
