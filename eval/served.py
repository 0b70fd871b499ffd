"""served.json: what a server's clients waited for at each number of clients, its cost, and the comparison of two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eval.intervals import paired_bootstrap, ratio
from speculator.acceptance import Acceptance
from speculator.errors import UserError
from speculator.report import Interval
from speculator.tables import markdown_table, shown

SERVED = "served.json"
PART = ", "
"""Between the names of a suite and of its category."""
DRAFTS = ("steps", "accepted_tokens", "accepted_per_position", "drafted_tokens")
"""Fields of a `Level` that a server counts."""
_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(kw_only=True)
class Level:
    """A suite at one temperature, asked by one number of clients.

    Attributes:
        digest: hash of the prompts.
        rate: requests per second; None: each client sends its next one right after an answer.
        answers: of each prompt: new tokens, seconds to the first one, seconds to the last one.
        tokens_per_second: of all clients.
        ttft_ms, tpot_ms, answer_ms: time to the first token, per token after it, and of whole answers, in milliseconds
            at the 50th, 95th and 99th percentile.
        within: share of the answers within the limits of `--slo`.
        goodput: such answers per second.
        steps: verification steps that the server counted; 0: it does not draft, or counts nothing.
        accepted_tokens: accepted draft tokens.
        accepted_per_position: steps that accepted the draft token at each position; [] from a llama-server.
        drafted_tokens: None from servers other than llama-server.
    """

    suite: str
    digest: str
    temperature: float
    max_new_tokens: int
    clients: int
    rate: float | None
    answers: list[list[float]]
    tokens_per_second: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    answer_ms: list[float]
    within: float
    goodput: float
    steps: int
    accepted_tokens: int
    accepted_per_position: list[int]
    drafted_tokens: int | None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per step; None without steps."""
        return 1 + self.accepted_tokens / self.steps if self.steps else None

    @property
    def keeps(self) -> bool:
        """Whether 95% of the answers are within the limits."""
        return self.within >= 0.95


Speedups = dict[str, list[tuple[Level, Level, Interval]]]
"""Levels of A and B, and the speed of B over A, by suite and temperature, in the order of the numbers of clients."""


@dataclass(kw_only=True)
class Served:
    """The content of served.json.

    Attributes:
        slo: limits in milliseconds, "ttft" and "tpot".
        price: of the server per hour; None: not given.
        hours: that the head's training took; None: unknown.
        forecast: content of the head's forecast.json; None without one.
    """

    server: str
    target: str
    speculator: str | None
    date: str
    argv: list[str]
    slo: dict[str, float]
    price: float | None
    hours: float | None
    forecast: dict[str, Any] | None
    suites: list[Level] = field(default_factory=list)


def figures(
    answers: list[list[float]], clients: int, seconds: float | None, limits: dict[str, float]
) -> dict[str, Any]:
    """Return a `Level`'s fields by its answers, which took `seconds` together (None: all clients were always busy)."""
    tokens, first, whole = np.array(answers).T
    per_token = (whole - first) / np.maximum(tokens - 1, 1)
    found = {"ttft": 1e3 * first, "tpot": 1e3 * per_token}
    good = np.all([tokens > 0, *(found[name] <= limit for name, limit in limits.items())], axis=0)
    # Of N clients that wait all the time each gets the tokens of an answer in its seconds.
    seconds = seconds or whole.sum() / clients
    later = per_token[tokens > 1] if (tokens > 1).any() else np.zeros(1)
    quantiles = {"ttft_ms": 1e3 * first, "tpot_ms": 1e3 * later, "answer_ms": 1e3 * whole}
    return {
        "tokens_per_second": float(tokens.sum() / seconds),
        **{name: np.quantile(values, _QUANTILES).tolist() for name, values in quantiles.items()},
        "within": float(good.mean()),
        "goodput": float(good.sum() / seconds),
    }


def with_totals(levels: list[Level], digests: dict[str, str], limits: dict[str, float]) -> list[Level]:
    """Return the levels of categories, each suite's at a temperature followed by one level of all; `digests` by suite.

    A suite without categories has the one level that it has. The categories were measured one after the other.
    """
    made = list[Level]()
    for suite, digest in digests.items():
        mine = [level for level in levels if level.suite == suite or level.suite.startswith(suite + PART)]
        for temperature in dict.fromkeys(level.temperature for level in mine):
            parts = [level for level in mine if level.temperature == temperature]
            made += parts
            if len(parts) == 1:
                continue
            answers = [answer for part in parts for answer in part.answers]
            seconds = sum(sum(answer[0] for answer in part.answers) / part.tokens_per_second for part in parts)
            counted = sum((Acceptance([part.steps, *part.accepted_per_position]) for part in parts), Acceptance())
            accepted, drafted = (sum(getattr(part, name) or 0 for part in parts) for name in (DRAFTS[1], DRAFTS[3]))
            drafts = dict(zip(DRAFTS, (counted.steps, accepted, counted.reached[1:], drafted or None), strict=True))
            clients, measured = max(part.clients for part in parts), figures(answers, 1, seconds, limits)
            whole = {"suite": suite, "digest": digest, "clients": clients, "answers": answers, **measured, **drafts}
            made.append(replace(parts[0], **whole))
    return made


def table(found: Served) -> str:
    """Return the levels of a served.json as Markdown, with what they cost and the head's forecast."""
    header = ["prompts", "temperature", "clients", "tokens/s", "first token, ms", "per token, ms", "answer, ms"]
    header += ["answers/s within limits", "steps", "accepted by position", "acceptance length"]
    cells = []
    for level in found.suites:
        accepted = _shares([count / level.steps for count in level.accepted_per_position]) if level.steps else ""
        if level.drafted_tokens:
            accepted = f"{level.accepted_tokens / level.drafted_tokens:.2f} of all drafted tokens"
        times = [" ".join(f"{value:.0f}" for value in each) for each in (level.ttft_ms, level.tpot_ms, level.answer_ms)]
        good = f"{level.goodput:.2f} ({level.within:.0%})"
        length = level.acceptance_length
        drafts = level.steps or "", accepted, f"{length:.2f}" if length else ""
        where = level.suite, f"{level.temperature:g}", level.clients
        cells.append((*where, f"{level.tokens_per_second:.1f}", *times, good, *drafts))
    if found.forecast:
        length, shares = found.forecast["acceptance_length"], _shares(found.forecast["accepted_per_draft"])
        blank = ("",) * (len(header) - 4)
        cells.append((f"forecast ({found.forecast['how']})", "0", *blank, shares, f"{length:.2f}"))
    lines = [markdown_table(header, cells), "", "Times are at the 50th, 95th and 99th percentile."]
    if found.price:
        busy = [level for level in found.suites if level.rate is None]  # a rate sets the throughput
        for suite in dict.fromkeys(map(_where, busy)):
            _, said = _cost([level for level in busy if _where(level) == suite], found.price)
            lines.append(f"{suite}: {said}")
    return "\n".join(lines)


def compare(a: Served, b: Served) -> tuple[str, Speedups]:
    """Return what differs between two servers as text, and the pairs of levels with the speed of B over A, by suite.

    Raises a UserError if they have no level in common.
    """
    ours, theirs = ({_key(level): level for level in each.suites} for each in (a, b))
    pairs: Speedups = {}
    for key in sorted((key for key in ours if key in theirs), key=lambda key: key[2:]):
        x, y = ours[key], theirs[key]
        pairs.setdefault(_where(x), []).append((x, y, paired_bootstrap(_samples(x, y), ratio)))
    if not pairs:
        raise UserError("the two have no prompts, temperature and number of clients in common")
    header = [
        "prompts",
        "clients",
        "B over A",
        "slower prompts",
        "tokens/s, A -> B",
        "first token, ms",
        "per token, ms",
    ]
    header.append("answers/s within limits")
    cells = []
    for where, found in pairs.items():
        for x, y, speedup in found:
            both = [(each.tokens_per_second, each.ttft_ms[1], each.tpot_ms[1], each.goodput) for each in (x, y)]
            slower = sum(ratio([each]) < 1 for each in _samples(x, y)) / len(x.answers)
            moved = (f"{a:.3g} -> {b:.3g}" if b < 10 else f"{a:.1f} -> {b:.1f}" for a, b in zip(*both, strict=True))
            cells.append((where, x.clients, shown(speedup), f"{slower:.0%}", *moved))
    alone = sum(key not in theirs for key in ours) + sum(key not in ours for key in theirs)
    lines = []
    for name, each in (("A", a), ("B", b)):
        head = f", head {each.speculator}" if each.speculator else ""
        lines.append(f"{name}: {each.server}, target {each.target}{head}, {each.date}")
    lines += ["times at the 95th percentile", "", markdown_table(header, cells), ""]
    if alone:
        lines.append(f"{alone} rows are of one server only: other prompts, clients, temperature or --max_new_tokens")
    drafts = [max(level.acceptance_length or 1 for level in each.suites) > 1 for each in (a, b)]
    busy = {where: found for where, found in pairs.items() if found[0][0].rate is None}
    lines += _verdicts(busy, "drafting" if drafts == [False, True] else "B")
    if a.slo != b.slo:
        lines.append("A and B have other limits (--slo): their answers within limits and costs can't be compared")
    elif price := b.price or a.price:
        for where, found in busy.items():
            before = _cost([level for level, _, _ in found], a.price or price)
            after = _cost([level for _, level, _ in found], price)
            lines += [f"{where}: {line}" for line in _paid(before, after, price, b.hours)]
    return "\n".join(lines), pairs


def _samples(a: Level, b: Level) -> list[tuple[float, ...]]:
    """Return tokens and seconds of B, then of A, for each prompt of two levels."""
    return [(*own[::2], *other[::2]) for own, other in zip(b.answers, a.answers, strict=True)]


def _verdicts(pairs: Speedups, what: str) -> Iterator[str]:
    """Yield per suite a sentence on `what`: at how many clients B is worth serving, at the worst temperature."""
    suites: dict[str, list[list[tuple[Level, Level, Interval]]]] = {}
    for found in pairs.values():
        suites.setdefault(found[0][0].suite, []).append(found)
    for temperatures in suites.values():
        worst = min(temperatures, key=lambda found: (pays_up_to(found) or 0, min(ratio.value for *_, ratio in found)))
        most, end, last = pays_up_to(worst), stops_at(worst), worst[-1][0].clients
        whom = f"worth serving up to {most} clients" if most else "not shown to pay"
        whom = "worth serving for one user at a time" if most == 1 else whom
        stop = f"is nowhere slower, up to {last}"
        if end:
            first = worst[0][0].clients
            stop = f"stops paying at about {end:.0f} clients" if end > first else f"is slower already at {first}"
        yield f"verdict: {what} is {whom} ({_where(worst[0][0])}); it {stop}"


def pays_up_to(found: Sequence[tuple[Level, Level, Interval]]) -> int | None:
    """Return the largest number of clients up to which all lower bounds of the speedup are above 1; None: none is."""
    most = None
    for level, _, speedup in found:
        if speedup.low is None or speedup.low <= 1:
            break
        most = level.clients
    return most


def stops_at(found: Sequence[tuple[Level, Level, Interval]]) -> float | None:
    """Return the number of clients at which the speedup falls to 1, interpolated over its logarithm; None: nowhere."""
    if found[0][2].value < 1:
        return found[0][0].clients
    for (x, _, before), (y, _, after) in pairwise(found):
        if after.value < 1:
            # From 1.4 at 4 clients to 0.8 at 16 the speedup falls by 0.6 in two doublings, so to 1 in 1.33.
            share = (before.value - 1) / (before.value - after.value)
            return float(x.clients * (y.clients / x.clients) ** share)
    return None


def _paid(before: tuple[float, str], after: tuple[float, str], price: float, hours: float | None) -> Iterator[str]:
    """Yield sentences on the costs of A and B, `before` and `after`, and when the training of B's head has paid.

    `price` is that of an hour. The training took `hours`; None: unknown.
    """
    yield f"A {before[1]}; B {after[1]}"
    saved = before[0] - after[0]
    if math.isinf(before[0]) or math.isinf(after[0]):
        return
    if saved <= 0:
        yield "B costs no less, so a training does not pay"
        return
    training = f"{hours:.1f} hours of training are" if hours else "each hour of training at this price is"
    yield f"{training} paid after {price * (hours or 1.0) / saved:,.1f} million tokens"


def _cost(levels: Sequence[Level], price: float) -> tuple[float, str]:
    """Return the least cost per million tokens within the limits (inf: none), at a `price` per hour, and a clause."""
    within = [level for level in levels if level.keeps]
    if not within:
        return math.inf, "keeps the limits at no number of clients"
    best = max(within, key=lambda level: level.tokens_per_second)
    cost = price / (3600 * best.tokens_per_second) * 1e6
    return cost, f"costs {cost:.3g} per million tokens, with {best.clients} client{'s' * (best.clients > 1)}"


def _where(level: Level) -> str:
    return f"{level.suite}, temperature {level.temperature:g}"


def _key(level: Level) -> tuple[str, str, str, float, int]:
    """Return what two levels share if they can be compared; tables are sorted by it."""
    rate = f"{level.max_new_tokens} {level.rate}"
    return level.digest, rate, level.suite, level.temperature, level.clients


def _shares(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def path_of(path: Path) -> Path | None:
    """Return the served.json at a path, which may be its folder; None if something else is there."""
    file = path / SERVED if path.is_dir() else path
    return file if file.name == SERVED and file.is_file() else None
