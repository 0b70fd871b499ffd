"""The values of a run's config.yaml and report.json (see docs/reference/report.md), and of `eval gate` and `adapt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from speculator.files import Json

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class RunRecord(TypedDict, total=False):
    """The content of a run's config.yaml; `settings` are those of `RunConfig`, in older versions fewer."""

    settings: dict[str, Any]
    processes: int
    versions: dict[str, str]
    python: str
    git_commit: str | None
    argv: list[str]
    fingerprints: dict[str, str]


class Interval(TypedDict):
    """A figure with its 95% interval; a single sample has no bounds."""

    value: float
    low: float | None
    high: float | None


class Bounds(TypedDict):
    """The 95% interval of a figure that has a key of its own."""

    low: float | None
    high: float | None


class Figures(TypedDict, total=False):
    """Acceptance and speed of one decoder: over a suite, or over one of its categories.

    A dict of speeds has the row's drafter as "speculative" and the baselines by name. Rows of plain decoding have no
    drafter, and None at that key.
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
    tokens_per_second: dict[str, float]
    end_to_end_tokens_per_second: dict[str, float]
    speedup: dict[str, Interval]


class Cost(TypedDict):
    """Cost of a drafted position and of a verification, in plain decoding steps."""

    draft: float
    verify: float


Bucket = TypedDict(
    "Bucket",
    {"from": int, "below": int, "steps": int, "acceptance_length": float, "beyond_trained_length": bool},
)
"""Acceptance length at context lengths from one bound up to the next."""


class Identical(TypedDict):
    """How many completions are identical to transformers' greedy ones."""

    identical: int
    of: int
    dtype: str


class ServerLog(TypedDict):
    """What a server would log about its drafts, see `eval.as_server.server_log`."""

    drafts: int
    accepted_per_position: list[int]
    mean_acceptance_length: float


class ReportRow(Figures, total=False):
    """One decoder on one suite, at one temperature and batch size."""

    prompts: int
    digest: str
    left_out: dict[str, int]
    chat: bool
    temperature: float
    batch_size: int
    max_new_tokens: int
    drafter: str
    num_speculative_tokens: int
    nodes: int
    rule: str
    cost: Cost
    acceptance_by_context: list[Bucket]
    time_to_first_token: dict[str, float]
    peak_memory_bytes: dict[str, int | None]
    identical_to_greedy: Identical
    server_log: ServerLog
    rows_busy: float
    predicted_speedup: float
    categories: list[Figures]


class Report(TypedDict, total=False):
    """The content of report.json."""

    schema: int
    target: str
    speculator: str
    hardware: str
    versions: dict[str, str]
    settings: dict[str, Json]
    not_run: dict[str, str]
    warnings: list[str]
    suites: list[ReportRow]
    training: dict[str, dict[str, list[list[float]]]]


class HeadsCompared(TypedDict):
    """An old and a new head on the same prompts: pairs of figures, and the difference of their tokens per second."""

    name: str
    prompts: int
    tokens_per_second: list[float]
    difference: Interval
    acceptance_length: list[float]


class Guard(TypedDict):
    """Acceptance lengths on the guard suite, and the change and the least allowed one as shares of the old length."""

    name: str
    old: float
    new: float
    change: float
    allowed: float


class Gate(TypedDict, total=False):
    """What `eval gate` measures and decides."""

    suite: HeadsCompared
    guard: Guard | None
    accepted: bool
    line: str


class Round(TypedDict):
    """The content of round.json: the heads, how far the traffic was read, and "in use" or why the new head isn't.

    Older versions wrote no `newest_tokens`.
    """

    old: str
    new: str
    answer_tokens: int
    newest: str
    newest_tokens: NotRequired[int]
    gate: Gate
    outcome: str
    finished: float
