"""An evaluation: suites x temperatures x decoders, measured in turns, written as report.json, report.md and plots."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from eval.acceptance import acceptance
from eval.bootstrap import paired_bootstrap
from eval.plots import draw_plots
from eval.report import write
from eval.speed import Timed, step_costs, time_ours, time_transformers
from eval.suites import Suite
from speculator import HeadDrafter, NgramDrafter, Sampling, UserError
from speculator.drafters import Drafter
from speculator.errors import refuse, refuse_below
from speculator.files import make_folder
from speculator.heads import Speculator
from speculator.target import Target, dtype_name


def evaluate(
    target: Target,
    head: Speculator,
    suites: list[Suite],
    output: Path,
    *,
    temperatures: list[float],
    max_new_tokens: int,
    speculator_name: str,
    seed: int = 0,
) -> dict:
    """Measure and write the report; gives report.json's content.

    Every prompt goes through every decoder before the next prompt comes, in an order that rotates, so that a machine
    whose speed drifts slows all of them alike. EOS is ignored: all texts are equally long.
    """
    check_lengths(target, max(len(prompt) for suite in suites for prompt in suite.prompts), max_new_tokens)
    make_folder(output)
    drafters: dict[str, Drafter | None] = {
        "none": None,
        "head": HeadDrafter(head),
        "ngram": NgramDrafter(head.n_predict),
    }
    rows: list[dict] = []
    for suite in suites:
        for temperature in temperatures:
            sampling = Sampling(temperature, seed=seed)
            timed = _decode(target, drafters, suite, sampling, max_new_tokens)
            rows += [_row(target, name, drafters[name], suite, sampling, timed, max_new_tokens) for name in drafters]
    report = {
        "schema": 1,
        "target": target.name,
        "speculator": speculator_name,
        "hardware": hardware(target),
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
        "settings": {
            "batch_size": 1,
            "dtype": dtype_name(target.dtype),
            "threads": torch.get_num_threads(),
            "ignore_eos": True,
            "seed": seed,
            "draft_length": head.n_predict,
            "prompt_tokens": sorted({len(prompt) for suite in suites for prompt in suite.prompts}),
        },
        "suites": rows,
    }
    draw_plots(report, output)
    write(report, output)
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
    refuse(
        (not abs(given.get("seed", 0)) < 2**62, "--seed must be below 2**62 in size"),
        (output.exists() and not output.is_dir(), f"--output {output} is not a folder"),
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


def _decode(
    target: Target, drafters: dict[str, Drafter | None], suite: Suite, sampling: Sampling, count: int
) -> dict[str, Timed]:
    timed = {name: Timed() for name in [*drafters, "hf_generate"]}
    warm_up = suite.prompts[0]
    for drafter in drafters.values():
        time_ours(target, drafter, [warm_up], sampling, 8, Timed())
    time_transformers(target, warm_up, sampling, 8, Timed())
    order = list(timed)
    progress = tqdm(suite.prompts, desc=f"{suite.name}, temperature {sampling.temperature:g}", unit="prompt")
    for index, prompt in enumerate(progress):
        own = replace(sampling, seed=sampling.seed + index)
        order = order[1:] + order[:1]
        for name in order:
            if name == "hf_generate":
                time_transformers(target, prompt, own, count, timed[name])
            else:
                time_ours(target, drafters[name], [prompt], own, count, timed[name])
    return timed


def _row(
    target: Target,
    name: str,
    drafter: Drafter | None,
    suite: Suite,
    sampling: Sampling,
    timed: dict[str, Timed],
    max_new_tokens: int,
) -> dict:
    own = timed[name]
    baselines = {"same_loop": timed["none"], "hf_generate": timed["hf_generate"]}
    row = {
        "name": suite.name,
        "prompts": len(suite.prompts),
        "temperature": sampling.temperature,
        "max_new_tokens": max_new_tokens,
        "drafter": name,
        "rule": "greedy" if sampling.greedy else drafter.rules[0] if drafter else "plain",
        "lossy": False,
        **acceptance(own.steps, drafter.draft_length if drafter else 0),
        "tokens_per_second": {
            "speculative": own.tokens_per_second if drafter else None,
            **{baseline: timed_as.tokens_per_second for baseline, timed_as in baselines.items()},
        },
        "end_to_end_tokens_per_second": {
            "speculative": own.end_to_end_tokens_per_second if drafter else None,
            **{baseline: timed_as.end_to_end_tokens_per_second for baseline, timed_as in baselines.items()},
        },
    }
    if sampling.greedy:
        row["identical_to_greedy"] = {
            "identical": sum(a == b for a, b in zip(own.tokens, timed["hf_generate"].tokens, strict=True)),
            "of": len(own.tokens),
            "dtype": dtype_name(target.dtype),
        }
    if drafter:
        row["speedup"] = {baseline: speedup(own, timed_as) for baseline, timed_as in baselines.items()}
        cost = row["cost"] = step_costs(target, drafter, suite.prompts[0], sampling)
        step = drafter.draft_length * cost["draft_over_decode"] + cost["verify_over_decode"]
        row["predicted_speedup"] = row["tokens_per_step"] / step
    return row


def speedup(ours: Timed, baseline: Timed) -> dict[str, float]:
    """Ratio of decode-only tokens per second, with a 95% interval by paired bootstrap over prompts, or batches."""

    def ratio(samples: Sequence[tuple[int, float, int, float]]) -> float:
        a, sa, b, sb = (sum(column) for column in zip(*samples, strict=True))
        return (a / sa) / (b / sb)

    columns = (ours.decoded, ours.decode_seconds, baseline.decoded, baseline.decode_seconds)
    return paired_bootstrap(list(zip(*columns, strict=True)), ratio)


def hardware(target: Target) -> str:
    """The machine in a line: GPU, or CPU and its threads."""
    if target.device.type == "cuda":
        return torch.cuda.get_device_name(target.device)
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"CPU {model or platform.machine()}, {torch.get_num_threads()} threads"
