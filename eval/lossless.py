"""`speculator eval lossless`: see `eval.flags.lossless`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta

from eval.checks import Check
from eval.flags import SAMPLED_PROMPTS
from eval.greedy_check import greedy_checks
from eval.sampled_check import batch_size, coupled_checks, sampled_checks
from eval.suites import Suite, check_flags, first_turns
from eval.timing import step_seconds
from speculator import Drafter, Target
from speculator.checkpoints import head_folder
from speculator.cli import model_flags
from speculator.decoding.drafter import Shape
from speculator.decoding.verify import MATCH
from speculator.device import dtype_name
from speculator.drafters import HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.tuning import adaptive_drafter, read_tuning
from speculator.errors import refuse_below
from speculator.files import check_output_file, write_json
from speculator.tables import markdown_table
from speculator.terminal import log

_MOST = {"max_prompts": 32, "samples": 4000}
_LEAST_SAMPLES = 100
_SECONDS = 15 * 60
"""Time that the defaults fit into: half for completions token by token, half for samples."""


def run(arguments: argparse.Namespace) -> int:
    """Run `speculator eval lossless`: print the checks and the verdict; return exit code 0 if all pass, else 1."""
    arguments.temperature = arguments.temperature or [0.0, 1.0]
    fixed = {name: getattr(arguments, name) for name in _MOST}
    vars(arguments).update({name: _MOST[name] for name, given in fixed.items() if given is None})
    check_flags(arguments)
    refuse_below(arguments, samples=_LEAST_SAMPLES, max_new_tokens=3 if max(arguments.temperature) > 0 else 2)
    model_flags.check(arguments, required=True)
    check_output_file("--output", arguments.output)
    target = model_flags.load_target(arguments)
    suite = first_turns(arguments, arguments.suite, target)
    drafter = model_flags.drafter(arguments, target)
    assert drafter is not None  # `check` requires one
    adaptive = _adaptive(arguments, target, drafter)
    suite = _fit(arguments, target, drafter, suite, fixed, 2 if adaptive else 1)
    temperatures, rule = arguments.temperature, arguments.rule
    warm = [temperature for temperature in temperatures if temperature > 0]
    sampled = suite.prompts[:SAMPLED_PROMPTS]
    checks: list[Check] = []
    families = 2 if adaptive else 1
    for who, prefix in ((drafter, ""), (adaptive, "adaptive: ")):
        made: list[Check] = []
        if who and 0.0 in temperatures:
            made += greedy_checks(target, who, suite.prompts, arguments.max_new_tokens, rule)
        if who and warm:
            if (rule or who.rules[0]) == MATCH:
                made += coupled_checks(target, who, suite.prompts, warm, arguments.max_new_tokens, arguments.seed)
            made += sampled_checks(target, who, sampled, warm, arguments.samples, rule, arguments.seed, families)
        checks += [replace(check, name=prefix + check.name) for check in made]
    failed = [f"{check.name} at temperature {check.temperature:g}" for check in checks if not check.passed]
    verdict = f"NOT LOSSLESS: {'; '.join(failed)}" if failed else "LOSSLESS"
    rule = rule or drafter.rules[0]
    dtype = dtype_name(target.dtype)
    print(f"{target.name} in {dtype}, {suite.name}, {drafter.name} drafts {drafter.nodes} tokens, rule {rule}\n")
    print(table(checks))
    if warm:
        tests = [check.figures for check in checks if "detectable" in check.figures]
        alpha, off = tests[0]["alpha"], max(figures["detectable"] for figures in tests)
        print(
            f"\nA test fails at a p-value below {alpha:.1e}. It detects a total variation of {off:.2g} over its cells"
        )
        print("99 times in 100.")
    print(f"\n{verdict}")
    if arguments.output:
        settings = {name: value for name, value in vars(arguments).items() if name != "output"}
        report = {"schema": 1, "lossless": not failed, "rule": rule, "dtype": dtype, "settings": settings}
        write_json(arguments.output, {**report, "checks": [asdict(check) for check in checks]})
    return int(bool(failed))


def _fit(
    arguments: argparse.Namespace,
    target: Target,
    drafter: Drafter,
    suite: Suite,
    fixed: Mapping[str, int | None],
    drafters: int,
) -> Suite:
    """Set the numbers of prompts and samples left open, None in `fixed`; print the time and return the suite to check.

    They are set in `arguments`. The time is that of plain steps: drafts may shorten it, verification may lengthen it.
    """
    rows = batch_size(target, drafter, arguments.samples)
    one, many = (step_seconds(target, suite.prompts[0], count) for count in (1, rows))
    warm = sum(temperature > 0 for temperature in arguments.temperature)
    # Alone, in a batch, plain, and by transformers twice; above temperature 0 transformers decodes one prompt only.
    decodings = drafters * (5 * (0.0 in arguments.temperature) + 3 * warm)
    per_prompt = decodings * arguments.max_new_tokens * one
    prompts = len(suite.prompts)
    if fixed["max_prompts"] is None:
        prompts = max(1, min(prompts, int(_SECONDS / 2 / max(per_prompt, 1e-9))))
    # A batch of samples prefills nothing: its prompt is there. Each completion has three tokens.
    cases = drafters * warm * min(SAMPLED_PROMPTS, prompts)
    per_batch = cases * 2 * 3 * many
    if fixed["samples"] is None and cases:
        batches = int(_SECONDS / 2 / max(per_batch, 1e-9))
        arguments.samples = max(_LEAST_SAMPLES, min(arguments.samples, batches * rows))
    arguments.max_prompts = prompts
    seconds = prompts * per_prompt + (arguments.samples / rows * per_batch if cases else 0)
    what = f"{prompts} prompts of {arguments.max_new_tokens} new tokens"
    what += f", and 2 x {arguments.samples:,} samples after {min(SAMPLED_PROMPTS, prompts)}" * bool(cases)
    log(f"about {timedelta(seconds=round(seconds))} for {what}; --max_prompts and --samples change it")
    return suite.first(prompts)


def _adaptive(arguments: argparse.Namespace, target: Target, drafter: Drafter | None) -> AdaptiveDrafter | None:
    """Return an adaptive drafter, or None if a flag names the draft's shape, or the drafter uses no head.

    At any number of rows it uses the step costs of one row, at which drafting pays.
    """
    if not isinstance(drafter, HeadDrafter) or model_flags.shaped(arguments):
        return None
    tuning = read_tuning(head_folder(arguments.speculator, arguments.speculator_revision), drafter.head)
    tuned = adaptive_drafter(drafter.head, target, tuning, temperatures=arguments.temperature)

    def alone(shape: Shape | None, tokens: int, path: bool, greedy: bool, rows: int) -> float:
        return tuned.cost(shape, round(tokens / rows), path, greedy, 1)

    return AdaptiveDrafter(tuned.head, tuned.choices, tuned.lookup, alone, packed=tuned.packed)


def table(checks: Sequence[Check]) -> str:
    """Return the checks as a Markdown table; with a small "drafted" (share of accepted drafts) a pass proves little."""
    header = ("temperature", "check", "sample", "drafted", "statistic", "result", "verdict")
    rows = []
    for check in checks:
        drafted, verdict = f"{check.figures['drafted_share']:.0%}", "pass" if check.passed else "FAIL"
        figures = (check.sample, drafted, check.statistic, check.result, verdict)
        rows.append((f"{check.temperature:g}", check.name, *figures))
    return markdown_table(header, rows)
