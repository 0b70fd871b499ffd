"""The chart of the README, docs/speedup.svg, drawn from a report."""

from __future__ import annotations

import json
from pathlib import Path

_DOCS = Path(__file__).parent
REPORT = _DOCS / "lab" / "qwen2.5_coder" / "humaneval-t0" / "report.json"
CHART = _DOCS / "speedup.svg"
_BARS = {"none": "plain decoding", "ngram": "n-gram lookup", "head": "draft head", "adaptive": "both, adaptive"}
_LEFT, _TOP, _ROW, _UNIT = 130, 30, 34, 190  # of the first bar; between bars; width of 1 x
_STYLE = """text { font: 14px sans-serif; fill: #1f2328 } .small { font-size: 12px; fill: #59636e }
.bar { fill: #8c959f } .best { fill: #1a7f37 } .decoding { stroke: #1f2328; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } .decoding { stroke: #f0f6fc } }"""


def speedups() -> dict[str, tuple[float, float]]:
    """Return (whole answers, decoding alone) of each way to decode, over plain decoding."""
    rows = {row["drafter"]: row for row in json.loads(REPORT.read_text(encoding="utf-8"))["suites"]}
    found = {"none": (1.0, 1.0)}
    for key in list(_BARS)[1:]:
        whole = rows[key]["end_to_end_tokens_per_second"]
        found[key] = whole["speculative"] / whole["plain"], rows[key]["speedup"]["plain"]["value"]
    return found


def svg() -> str:
    """Return the chart: a bar for whole answers, and a mark for decoding alone."""
    parts = []
    for index, (key, (whole, decoding)) in enumerate(speedups().items()):
        y, width = _TOP + index * _ROW, round(whole * _UNIT)
        kind = "best" if key == "adaptive" else "bar"
        parts += [
            f'<text x="{_LEFT - 10}" y="{y + 17}" text-anchor="end">{_BARS[key]}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="24" rx="3"/>',
            f'<text x="{_LEFT + width - 8}" y="{y + 17}" text-anchor="end" style="fill: #fff">{whole:.2f}</text>',
        ]
        if key != "none":
            at = _LEFT + round(decoding * _UNIT)
            parts += [
                f'<line class="decoding" x1="{at}" y1="{y - 2}" x2="{at}" y2="{y + 26}"/>',
                f'<text class="small" x="{at + 8}" y="{y + 17}">{decoding:.2f}</text>',
            ]
    height = _TOP + len(_BARS) * _ROW + 8
    title = "Speedup over plain decoding. Bars: whole answers, prefill included. Lines: decoding alone."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" role="img">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            f'<text class="small" x="{_LEFT}" y="18">{title}</text>',
            *parts,
            "</svg>\n",
        ]
    )
