"""Decide who writes a target's text: its engine in this process, or the servers that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from data.writers.base import Writer
from data.writers.engine import EngineWriter
from speculator.drafters import Drafter
from speculator.target.base import TrainingTarget
from speculator.target.model import Target

if TYPE_CHECKING:
    from data.writers.server import TextOnly


def writer_of(
    target: TrainingTarget | TextOnly,
    batch_size: int,
    draft: Callable[[Target], Drafter | None] | None = None,
    concurrency: int | None = None,
) -> Writer:
    """Return the writer of a target's text.

    Args:
        target: a `Target`, or one that servers run.
        batch_size: rows that the engine decodes together.
        draft: return a drafter for a target in this process; None: plain decoding. Servers have their own.
        concurrency: concurrent requests to each server (default: `batch_size`, at least 32).
    """
    if isinstance(target, Target):
        return EngineWriter(target, draft(target) if draft else None, batch_size)
    from data.writers.server import CONCURRENCY, ServerWriter  # imports openai, for a second

    served: Any = target  # a `ServerTarget`, or `TextOnly`
    return ServerWriter(served, concurrency or max(CONCURRENCY, batch_size))
