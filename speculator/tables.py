"""Markdown tables, intervals, and the names of drafters and baselines in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from speculator.report import Interval

DRAFTERS = {
    "head": "draft head",
    "ngram": "n-gram lookup",
    "draft_model": "draft model",
    "adaptive": "adaptive",
}
"""Drafters: name in report.json, name in tables."""

BASELINES = {
    "plain": "plain decoding",
    "hf_generate": "transformers generate",
    "hf_compiled": "transformers generate, static cache, compiled",
    "hf_prompt_lookup": "transformers prompt lookup",
    "hf_assisted": "transformers assisted generation",
}
"""Baselines: name in report.json, name in tables."""
OPTIONAL = tuple(BASELINES)[2:]
"""Baselines that run only if they are asked for."""


def shown(interval: Interval, form: str = ".2f") -> str:
    """Format a figure with its interval: "1.32 (1.28 to 1.36)", or "1.32 (one sample)" if it has no bounds."""
    if interval.low is None:
        return f"{interval.value:{form}} (one sample)"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a Markdown table; line ends and bars in cells are replaced."""
    cells = [[" ".join(str(cell).split()).replace("|", r"\|") for cell in row] for row in (header, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def gigabytes(size: float) -> str:
    """Format bytes as GB (10^9) with about three digits."""
    value = size / 1e9
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:,.{digits}f}"
