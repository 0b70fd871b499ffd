"""`speculator eval`: see `eval.flags.run`."""

from __future__ import annotations

import argparse
import hashlib
import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from data.mixture import PYTHON_SOURCES
from eval import in_server, tracking
from eval.as_server import default_lengths, server_decoders, server_log
from eval.decoders import Decoder, assisted_settings, check_batches, count_batches, decoder_of, decoders, measure_suite
from eval.metrics import row
from eval.page import write_page
from eval.plots import draw_plots
from eval.report import UNFINISHED, markdown, warnings
from eval.suites import FILTERS, Suite, check_flags, check_names, check_rows, sampling_of, suite_of
from eval.timing import Engines, memory_kind, step_seconds
from eval.traces import Trace, trace_suite
from speculator import HeadDrafter, Sampling, Target, load_head
from speculator.about import DISTRIBUTION, command_line, git_commit, version_of
from speculator.checkpoints import head_folder
from speculator.cli import model_flags
from speculator.device import dtype_name, hardware
from speculator.drafters.price import fastest_shape
from speculator.drafters.tuning import TUNED, adaptive_drafter, choices_of, read_tuning, tuned_prompts
from speculator.errors import refuse
from speculator.files import check_output_folder, locked, make_folder, write_text
from speculator.heads import Speculator
from speculator.report import SCHEMA, Report, ReportRow, write_record
from speculator.tables import BASELINES
from speculator.target.fingerprint import digest_of_weights
from speculator.terminal import log
from speculator.verdict import headlines

_SHORT = 16  # tokens of a prompt after which steps are timed


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval`: measure, write the report, and print its headlines; `--server` runs `eval.in_server`."""
    check_flags(arguments)
    of_load = [name for name in ("rate", "slo", "price") if getattr(arguments, name) is not None]
    refuse(
        (of_load and not arguments.clients, f"--{(*of_load, '')[0]} needs --clients"),
        (arguments.clients and not arguments.server_url, "--clients needs --server"),
        (not arguments.speculator and not arguments.server_url, "--speculator is required: the head to measure"),
    )
    check_rows(max(arguments.batch_size or [1]), arguments.max_prompts)
    others = arguments.draft_model or arguments.baseline
    refuse(
        (
            arguments.server != "ours" and others,
            "--as measures the head: no --draft_model or --baseline with it",
        ),
        (
            arguments.server != "ours" and arguments.rule == "match",
            "--as: a server's drafts are greedy without --rule, and sampled with rejection or block",
        ),
        (arguments.server != "ours" and arguments.server_url, "--as predicts a server and --server measures one"),
    )
    check_output_folder("--output", arguments.output)
    tracking.check(arguments.report_to)
    refuse((arguments.draft_model == "", "--draft_model is empty: give a hub id or the folder of a model"))
    make_folder(arguments.output)
    try:
        with locked(arguments.output / ".lock", f"--output {arguments.output}: another process is writing this report"):
            (in_server.run if arguments.server_url else _run)(arguments)
    finally:
        with suppress(OSError):
            arguments.output.rmdir()  # if it is empty: nothing was measured


def _run(arguments: argparse.Namespace) -> None:
    """Do the work of `run`, whose flags are right and whose folder is locked."""
    target = model_flags.load_target(arguments)
    folder = head_folder(arguments.speculator, arguments.speculator_revision)
    head = load_head(folder, target)
    draft_model = model_flags.load_draft_model(arguments)
    suites = [suite_of(arguments, source, target, arguments.raw) for source in arguments.suite or [PYTHON_SOURCES]]
    check_names(suites)
    check_batches(suites, arguments.batch_size or [1])
    lengths = arguments.num_speculative_tokens or default_lengths(arguments.server, head, target)
    default = ["hf_compiled"] * (target.device.type == "cuda") + ["hf_assisted"] * (draft_model is not None)
    report = evaluate(
        target,
        head,
        suites,
        arguments.output,
        Measuring(
            temperatures=arguments.temperature or [0.0, 1.0],
            max_new_tokens=arguments.max_new_tokens,
            sampled=sampling_of(arguments, 1.0),
            batch_sizes=arguments.batch_size or [1],
            repeats=arguments.repeats,
        ),
        Compared(
            lengths=sorted(set(lengths), reverse=True),
            tuned_in=None if arguments.num_speculative_tokens or arguments.rule else folder,
            draft_model=draft_model,
            baselines=arguments.baseline or default,
            rule=arguments.rule,
            server=arguments.server,
        ),
        speculator_name="@".join(filter(None, (arguments.speculator, arguments.speculator_revision))),
    )
    tracking.send(report, arguments.output, arguments.report_to)
    print("\n".join([*headlines(report), f"report: {arguments.output / 'report.html'}"]))


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """How every suite is measured: at each temperature and batch size.

    Attributes:
        max_new_tokens: the most new tokens of a prompt and turn.
        sampled: seed, and the filters above temperature 0; its own temperature does not count.
        batch_sizes: numbers of prompts that are decoded together.
        repeats: timings per batch, of which the median counts.
    """

    temperatures: Sequence[float]
    max_new_tokens: int
    sampled: Sampling = field(default_factory=Sampling)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Which decoders are measured, next to plain decoding.

    Attributes:
        lengths: values of `num_speculative_tokens` at which to measure chains of the head (default: its `n_predict`).
        tuned_in: the head's folder. Without `lengths`, and with server "ours", adaptive drafting is measured too
            (unless a `rule` is given). If the folder has a decoding.json, the head's fixed draft is then the one that
            the file predicts to be fastest.
        draft_model: a draft model to measure too.
        baselines: names from `speculator.tables.OPTIONAL`.
        rule: accept rule of every drafter above temperature 0 (default: each drafter's own).
        server: a name from `eval.flags.SERVERS`. Another server's drafts are compared with plain decoding only.
    """

    lengths: Sequence[int] = ()
    tuned_in: str | Path | None = None
    draft_model: Target | None = None
    baselines: Collection[str] = ()
    rule: str | None = None
    server: str = "ours"


def evaluate(
    target: Target,
    head: Speculator,
    suites: list[Suite],
    output: Path,
    measuring: Measuring,
    compared: Compared,
    *,
    speculator_name: str,
    training: dict[str, dict[str, list[list[float]]]] | None = None,
) -> Report:
    """Measure every suite, write the report, and return the content of report.json.

    If it breaks off, the suites, temperatures and batch sizes that are done are in `UNFINISHED`.

    Args:
        output: the report's folder, created if missing.
        speculator_name: name of the head in the report.
        training: curves of the head's training, {stage: {figure: points [step, value]}} (default: none).
    """
    temperatures, max_new_tokens, batch_sizes = measuring.temperatures, measuring.max_new_tokens, measuring.batch_sizes
    server, rule, draft_model = compared.server, compared.rule, compared.draft_model
    chains = list(compared.lengths) or [head.n_predict]
    most = head.config.max_speculative_tokens
    too_long = most is not None and max(chains) > most
    refuse((too_long, f"--num_speculative_tokens {max(chains)}: the head drafts at most {most} tokens"))
    make_folder(output)
    rows: list[ReportRow] = []
    traces: list[Trace] = []
    not_run: dict[str, str] = {}
    tuned_on = tuned_prompts(compared.tuned_in)
    content = _content(target, head, measuring, compared, speculator_name)

    def measured_so_far() -> Report:
        reasons = {BASELINES[name]: reason for name, reason in not_run.items()}
        return replace(content, not_run=reasons, warnings=warnings(rows), suites=rows)

    for batch_size in batch_sizes:
        engines: Engines = {}
        if server == "ours":
            fixed, reasons = decoders(target, head, chains, draft_model, compared.baselines, batch_size, engines, rule)
            not_run |= reasons
        else:
            fixed = server_decoders(target, head, chains, engines, rule)
        tables = dict.fromkeys(temperatures, fixed)
        if compared.tuned_in and not compared.lengths and server == "ours":
            tables = _tuned_tables(fixed, target, head, compared.tuned_in, temperatures, batch_size, engines, rule)
        if target.device.type == "cpu":  # on a GPU the first steps capture graphs
            needed = _time_needed(target, suites, tables, batch_size, max_new_tokens * measuring.repeats)
            log(needed if training else f"{needed}; --max_prompts changes it")  # a run's settings are fixed by now
        for suite, temperature in product(suites, temperatures):
            table, sampling = tables[temperature], replace(measuring.sampled, temperature=temperature)
            measured = measure_suite(target, table, suite, sampling, max_new_tokens, batch_size, measuring.repeats)
            not_run |= measured.not_run
            trained = head.config.trained_length
            ours = [decoder for decoder in table if decoder.ours]
            seen = len(tuned_on.intersection(suite.prompt_hashes))
            made = [row(target, d, suite, sampling, measured, max_new_tokens, batch_size, trained, seen) for d in ours]
            if server != "ours":
                for decoder, own in zip(ours[1:], made[1:], strict=True):
                    own.server_log = server_log(measured.timed[decoder.key], own.num_speculative_tokens)
            rows += made
            write_record(output / UNFINISHED, measured_so_far())  # after each, should memory run out later
            if batch_size == batch_sizes[0]:
                traces += trace_suite(target, list(zip(ours, made, strict=True)), suite, sampling, max_new_tokens)
        engines.clear()  # their caches and graphs would stay while the next batch size is measured
    report = replace(measured_so_far(), training=training or {})
    write_record(output / "report.json", report)  # first: hours of measurement must not depend on a plot
    render(report, traces, output)
    for line in report.warnings:
        log(f"warning: {line}")
    return report


def _content(
    target: Target, head: Speculator, measuring: Measuring, compared: Compared, speculator_name: str
) -> Report:
    """Return report.json's content before the first row, from `evaluate`'s arguments."""
    fingerprints = {"target": target.fingerprint, "speculator": digest_of_weights(head)}
    if compared.tuned_in and (tuning := Path(compared.tuned_in, TUNED)).is_file():
        fingerprints[TUNED] = hashlib.sha256(tuning.read_bytes()).hexdigest()
    batch_sizes, draft_model = measuring.batch_sizes, compared.draft_model
    assisted = draft_model is not None and "hf_assisted" in compared.baselines and 1 in batch_sizes
    versions = {"speculator": version_of(DISTRIBUTION), **{name: version(name) for name in ("torch", "transformers")}}
    return Report(
        schema=SCHEMA,
        target=target.name,
        speculator=speculator_name,
        fingerprints=fingerprints,
        git_commit=git_commit(),
        argv=command_line(),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        hardware=hardware(target.device),
        versions=versions | {"python": platform.python_version()},
        settings={
            "batch_size": batch_sizes[0] if len(batch_sizes) == 1 else list(batch_sizes),
            "dtype": dtype_name(target.dtype),
            "threads": torch.get_num_threads(),
            "seed": measuring.sampled.seed,
            **{name: getattr(measuring.sampled, name) for name in FILTERS},
            "repeats": measuring.repeats,
            "num_speculative_tokens": list(compared.lengths) or None,  # None: as tuned, or all the head's
            "draft_model": draft_model.name if draft_model else None,
            "hf_assisted": assisted_settings(max(compared.lengths, default=head.n_predict)) if assisted else None,
            "as": compared.server,
            "chat_template": bool(target.tokenizer and target.tokenizer.chat_template),
            "trained_length": head.config.trained_length,
            "peak_memory": memory_kind(target.device),
        },
        not_run={},
        warnings=[],
        suites=[],
    )


def _time_needed(
    target: Target, suites: Sequence[Suite], tables: dict[float, list[Decoder]], batch_size: int, tokens: int
) -> str:
    """Return a log line: the time for `tokens` new tokens per prompt if no answer ends early and drafts save none."""
    batches = sum(count_batches(suite, batch_size) for suite in suites)
    decodings = batches * sum(map(len, tables.values()))
    seconds = decodings * tokens * step_seconds(target, suites[0].prompts[0][:_SHORT], batch_size)
    unit = "turns" if batch_size == 1 else f"batches of {batch_size}"
    about = timedelta(seconds=round(seconds))
    work = f"{batches} {unit}, {decodings} decodings of {tokens} tokens"
    return f"measuring takes about {about} ({work})"


def _tuned_tables(
    fixed: list[Decoder],
    target: Target,
    head: Speculator,
    folder: str | Path,
    temperatures: Sequence[float],
    batch_size: int,
    engines: Engines,
    rule: str | None,
) -> dict[float, list[Decoder]]:
    """Return the decoders to measure, by temperature.

    They are `fixed`, of which the head's decoder gets its fastest draft if the head's `folder` has a decoding.json, and
    adaptive drafting unless a `rule` is given.
    """
    tables, tuning = {}, read_tuning(folder, head)
    for temperature in temperatures:
        adaptive = adaptive_drafter(head, target, tuning, temperatures=temperatures, batch_size=batch_size)
        tables[temperature] = list(fixed)
        if tuning:
            # Of all chains: adaptive drafting on a GPU has few, because each is a graph.
            shape = fastest_shape(choices_of(head, tuning), adaptive.cost, temperature == 0, batch_size)
            tuned = decoder_of(target, "head", HeadDrafter(head, shape), engines, rule)
            tables[temperature] = [tuned if decoder.key == "head" else decoder for decoder in fixed]
        if not rule:
            tables[temperature].append(decoder_of(target, "adaptive", adaptive, engines))
    return tables


def render(report: Report, traces: Sequence[Trace], output: Path) -> None:
    """Write plots, report.html and, last, report.md into a folder; log figures and plots to an open wandb run."""
    (output / UNFINISHED).unlink(missing_ok=True)
    draw_plots(report, output)
    write_page(report, traces, output)
    tracking.log(report, output)
    write_text(output / "report.md", markdown(report))
