"""The values of a run's config.yaml and of its report.json (see docs/reference/report.md), `eval gate` and `adapt`."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from speculator.errors import UserError
from speculator.files import read_json, write_json
from speculator.terminal import log

Record = TypeVar("Record")
SCHEMA = 3
"""Version of report.json."""
ByDecoder = dict[str, Any]
"""A figure of the row's drafter, as "speculative", and of the baselines by name; in rows of plain decoding the first is
None."""


class RunRecord(TypedDict, total=False):
    """The content of a run's config.yaml; `settings` are those of `RunConfig`."""

    settings: dict[str, Any]
    processes: int
    versions: dict[str, str]
    python: str
    git_commit: str | None
    argv: list[str]
    fingerprints: dict[str, str]


@dataclass
class Interval:
    """A figure with its 95% interval; a single sample has no bounds."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass
class Bounds:
    """The 95% interval of a figure that has a key of its own."""

    low: float | None
    high: float | None


@dataclass
class Spread:
    """Quantiles over conversations of the whole answers' speedup, and the share of them that got slower."""

    p5: float
    p50: float
    p95: float
    slower: float


@dataclass(kw_only=True)
class Figures:
    """Acceptance and speed of one decoder: over a suite, or over one of its categories, whose name it has.

    docs/reference/report.md explains the fields. Rows of plain decoding have no speedups.
    """

    name: str
    turns: int
    steps: int
    acceptance_length: float
    acceptance_length_interval: Bounds
    accepted_per_step: float
    undrafted_share: float
    acceptance_by_position: list[float]
    accepted_lengths: list[int]
    tokens_per_second: ByDecoder
    end_to_end_tokens_per_second: ByDecoder
    speedup: dict[str, Interval]
    end_to_end_speedup: dict[str, Interval]
    spread: Spread | None

    @property
    def length(self) -> Interval:
        return Interval(
            self.acceptance_length, self.acceptance_length_interval.low, self.acceptance_length_interval.high
        )


@dataclass
class Cost:
    """Cost of a drafted position and of a verification, in plain decoding steps."""

    draft: float
    verify: float


@dataclass(kw_only=True)
class Bucket:
    """Acceptance length of the steps that began at context lengths of `from` tokens or more, but fewer than `below`."""

    from_: int
    below: int
    steps: int
    acceptance_length: float
    beyond_trained_length: bool


@dataclass
class Identical:
    """How many completions are identical to transformers' greedy ones, out of how many, and the target's dtype."""

    identical: int
    of: int
    dtype: str


@dataclass
class ServerLog:
    """What a server would log about its drafts, see `eval.as_server.server_log`."""

    drafts: int
    drafted_tokens: int
    accepted_per_position: list[int]
    mean_acceptance_length: float


@dataclass(kw_only=True)
class ReportRow(Figures):
    """One decoder on one suite, at one temperature and batch size.

    Attributes:
        drafter: "none" for plain decoding, or a key of `speculator.tables.DRAFTERS`.
        cost: a plain step costs nothing to draft and 1 to verify.
        identical_to_greedy: None above temperature 0, or without transformers' completions.
        server_log: None unless the drafts were another server's.
        samples: of each conversation, or batch: tokens and seconds of whole answers, those of plain decoding, accepted
            draft tokens, and steps.
        acceptance_along_answer: as `acceptance_by_context`, but by the new tokens at the beginning of a step.
    """

    prompts: int
    digest: str
    left_out: dict[str, int]
    chat: bool
    temperature: float
    batch_size: int
    max_new_tokens: int
    tuned_on: int
    cut: int
    drafter: str
    num_speculative_tokens: int
    nodes: int
    rule: str
    cost: Cost
    acceptance_by_context: list[Bucket]
    time_to_first_token: ByDecoder
    peak_memory_bytes: ByDecoder
    identical_to_greedy: Identical | None
    server_log: ServerLog | None
    rows_busy: float
    predicted_speedup: float
    categories: list[Figures]
    samples: list[list[float]]
    acceptance_along_answer: list[Bucket] = field(default_factory=list)


@dataclass(kw_only=True)
class Report:
    """The content of report.json.

    Attributes:
        not_run: reason by baseline that could not run.
        suites: one row per suite, temperature, batch size and decoder.
        training: [step, value] pairs by stage and curve.
    """

    schema: int
    target: str
    speculator: str
    fingerprints: dict[str, str]
    git_commit: str | None
    argv: list[str]
    date: str
    hardware: str
    versions: dict[str, str]
    settings: dict[str, Any]
    not_run: dict[str, str]
    warnings: list[str]
    suites: list[ReportRow]
    training: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)


@dataclass
class HeadsCompared:
    """An old and a new head on the same prompts: figures as [old, new], and the difference of tokens per second."""

    name: str
    prompts: int
    tokens_per_second: list[float]
    difference: Interval
    acceptance_length: list[float]


@dataclass
class Guard:
    """Acceptance lengths on the guard suite, and the change and the least allowed one as shares of the old length.

    The old head is that of `--guard_head`: in `adapt` the one that the rounds began with.
    """

    name: str
    old: float
    new: float
    change: Interval
    allowed: float


@dataclass
class Gate:
    """What `eval gate` measures and decides.

    Attributes:
        suite: comparison on the suite that the new head must decode faster.
        guard: comparison on the guard suite, on which it must not become much worse; None without one.
        accepted: whether the new head may replace the old one.
        line: the decision and its figures in words.
    """

    suite: HeadsCompared
    guard: Guard | None
    accepted: bool
    line: str


@dataclass
class Round:
    """The content of round.json: what one round of `adapt` trained on, measured and decided.

    Attributes:
        old, new: folders of the heads.
        answer_tokens: number of answer tokens in the round.
        newest: name of the newest file of recorded traffic that was read.
        newest_tokens: number of answer tokens in `newest`, which may grow later.
        gate: result of the comparison.
        outcome: "in use", or the reason that the new head is not.
        finished: time of the end, in seconds since 1970.
    """

    old: str
    new: str
    answer_tokens: int
    newest: str
    newest_tokens: int
    gate: Gate
    outcome: str
    finished: float


class _SchemaError(UserError):
    pass


def read_report(file: Path) -> Report:
    """Read a report.json; a UserError says so if it is something else, or of another version."""
    if read_json(file).get("schema") != SCHEMA:
        raise _SchemaError(
            f'{file} is not a report.json of `speculator eval` with "schema": {SCHEMA}; measure again with '
            "`speculator eval`"
        )
    return read_record(Report, file)


def known_report(file: Path) -> Report | None:
    """Read a report.json; a missing one is None, and so is one of another version, with a warning."""
    try:
        return read_report(file) if file.is_file() else None
    except _SchemaError as error:
        log(f"warning: {error}")
        return None


def write_record(file: Path, record: Any) -> None:
    write_json(file, as_json(record))


def as_json(record: Any) -> Any:
    """Return a dataclass as an object of JSON. A name that is a keyword of Python has a "_" at its end only there."""
    return asdict(record, dict_factory=lambda pairs: {name.rstrip("_"): value for name, value in pairs})


def read_record(kind: type[Record], file: Path) -> Record:
    """Read a file that `write_record` wrote; a UserError names what it lacks."""
    try:
        return from_json(kind, read_json(file))
    except KeyError as error:
        raise UserError(f"{file}: no {error} in it") from None
    except (TypeError, AttributeError) as error:
        raise UserError(f"{file} is not complete: {error}") from None


def from_json(kind: Any, value: Any) -> Any:
    """Return a value of JSON as the type `kind` of a dataclass's field, or as a dataclass.

    A field with a factory may be missing: files from before it have none.

    Raises:
        KeyError: an object lacks a field.
        TypeError, AttributeError: a value is of another type.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        there = [each for each in fields(kind) if each.name.rstrip("_") in value or each.default_factory is MISSING]
        return kind(**{each.name: from_json(types[each.name], value[each.name.rstrip("_")]) for each in there})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return [from_json(inner[0], each) for each in value]
    if origin is dict:
        return {name: from_json(inner[1], each) for name, each in value.items()}
    if type(None) in inner:  # X | None
        return None if value is None else from_json(inner[0], value)
    if kind in (bool, int, float, str) and not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r:.40} is not of type {kind.__name__}")
    return value
