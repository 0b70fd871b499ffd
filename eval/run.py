"""An evaluation: suites x temperatures x batch sizes x decoders, written as a report with plots."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from eval import memory, tracking
from eval.decoders import BASELINES, decoder_of, decoders
from eval.figures import row, warnings
from eval.measuring import measure_suite
from eval.page import Text, texts, write_page
from eval.plots import draw_plots
from eval.report import write
from eval.speed import Engines
from eval.suites import Suite
from speculator import HeadDrafter, Sampling, UserError
from speculator.drafters.tuned import tuned_shapes
from speculator.errors import refuse, refuse_below
from speculator.files import make_folder
from speculator.heads import Speculator
from speculator.target import Target, dtype_name, hardware


def evaluate(
    target: Target,
    head: Speculator,
    suites: list[Suite],
    output: Path,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    speculator_name: str,
    seed: int = 0,
    batch_sizes: Sequence[int] = (1,),
    draft_lengths: Sequence[int] = (),
    tuned_in: str | Path | None = None,
    model: Target | None = None,
    baselines: Collection[str] = (),
    repeats: int = 1,
    rule: str | None = None,
) -> dict:
    """Measure and write the report; gives report.json's content. A wandb run that is on gets it too.

    Args:
        target: the model.
        head: who drafts.
        suites: what to decode.
        output: the report's folder.
        temperatures, batch_sizes: every suite at each of them.
        max_new_tokens: per prompt and turn.
        speculator_name: as the report calls the head.
        seed: of the sampling.
        draft_lengths: of the head's chains; default: all that it has.
        tuned_in: the head's folder: it drafts as was tuned there, where no `draft_lengths` are given.
        model: a draft model to compare with.
        baselines: beside the plain loop and transformers' generate: of `eval.decoders.OPTIONAL`.
        repeats: timings of every prompt, of which the median counts.
        rule: the accept rule of every drafter above temperature 0; default: each has its own.

    Raises:
        UserError: what was asked for does not fit the target or the head, or can't be written.
    """
    check_lengths(target, max(len(prompt) for suite in suites for prompt in suite.prompts), max_new_tokens)
    lengths = list(draft_lengths) or [head.n_predict]
    refuse((max(lengths) > head.n_predict, f"draft length {max(lengths)}: the head drafts at most {head.n_predict}"))
    make_folder(output)
    rows: list[dict] = []
    samples: list[Text] = []
    skipped: dict[str, str] = {}
    for batch_size in batch_sizes:
        shapes = tuned_shapes(tuned_in, target, head, temperatures, batch_size) if tuned_in else {}
        engines: Engines = {}
        default, unfit = decoders(target, head, lengths, model, baselines, batch_size, engines, rule)
        tuned = {t: HeadDrafter(head, shape) for t, shape in shapes.items() if shape and not draft_lengths}
        swapped = {t: decoder_of(target, "head", drafter, engines, rule) for t, drafter in tuned.items()}
        skipped |= unfit
        for suite, temperature in product(suites, temperatures):
            table = [swapped.get(temperature, d) if d.key == "head" else d for d in default]
            sampling = Sampling(temperature, seed=seed)
            measured = measure_suite(target, table, suite, sampling, max_new_tokens, batch_size, repeats)
            skipped |= measured.skipped
            trained = head.config.trained_length
            made = [
                row(target, d, suite, sampling, measured, max_new_tokens, batch_size, trained) for d in table if d.ours
            ]
            rows += made
            if batch_size == batch_sizes[0]:
                samples += texts(target, table, made, suite, sampling, max_new_tokens)
    report = {
        "schema": 1,
        "target": target.name,
        "speculator": speculator_name,
        "hardware": hardware(target.device),
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
        "settings": {
            "batch_size": batch_sizes[0] if len(batch_sizes) == 1 else list(batch_sizes),
            "dtype": dtype_name(target.dtype),
            "threads": torch.get_num_threads(),
            "ignore_eos": not any(suite.chat for suite in suites),
            "seed": seed,
            "repeats": repeats,
            "draft_length": lengths[0],
            "draft_model": model.name if model else None,
            "prompt_tokens": sorted({len(prompt) for suite in suites for prompt in suite.prompts}),
            "trained_length": head.config.trained_length,
            "peak_memory": memory.kind(target.device),
        },
        "not_run": {BASELINES[name]: reason for name, reason in skipped.items()},
        "warnings": warnings(rows),
        "suites": rows,
    }
    draw_plots(report, output)
    write_page(report, samples, output)
    write(report, output)
    for line in report["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    tracking.log(report, output)
    return report


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse what can't be, before any model is loaded: of the flags that measurements share.

    Raises:
        UserError: a count, temperature or seed out of range, or an output folder that is none.
    """
    refuse_below(arguments, max_prompts=1, prompt_tokens=1, max_new_tokens=2)
    given, output = vars(arguments), arguments.output
    for temperature in given.get("temperature") or []:
        Sampling(temperature)
    for name in ("batch_size", "draft_length", "repeats"):
        value = given.get(name)
        least = min(value, default=1) if isinstance(value, list) else 1 if value is None else value
        refuse((least < 1, f"--{name} must be at least 1"))
    for name in ("temperature", "batch_size", "draft_length"):
        value = given.get(name)
        refuse((isinstance(value, list) and len(set(value)) < len(value), f"--{name}: one value is given twice"))
    refuse(
        (not abs(given.get("seed", 0)) < 2**62, "--seed must be below 2**62 in size"),
        (output.suffix != ".json" and output.exists() and not output.is_dir(), f"--output {output} is not a folder"),
    )


def check_lengths(target: Target, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse texts that can't be timed, or do not fit the target.

    Raises:
        UserError: fewer than 2 new tokens, or more than the context has room for.
    """
    if max_new_tokens < 2:
        raise UserError("max_new_tokens must be at least 2: the first new token is the prefill's")
    if prompt_tokens + max_new_tokens > target.context_length:
        raise UserError(
            f"prompts of {prompt_tokens} tokens and {max_new_tokens} new ones do not fit {target.name}, which has a "
            f"context of {target.context_length}"
        )
