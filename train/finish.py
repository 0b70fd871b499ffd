"""The end of a run: tune the published head, measure it, and say how to use it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

from eval.in_server import FORECAST_FILE
from eval.run import Compared, Measuring, evaluate, render
from eval.suites import Suite
from eval.tune import write_tuning
from speculator.checkpoints import layouts, load_any
from speculator.checkpoints.card import NAME as CARD
from speculator.checkpoints.loading import load_head
from speculator.checkpoints.vllm_plugin import VERSION
from speculator.decoding.sampling import Sampling
from speculator.drafters.tuning import TUNED
from speculator.files import read_json
from speculator.report import known_report, read_report
from speculator.target.model import Target
from speculator.verdict import headlines
from train.options.config import RunConfig, TargetConfig
from train.stages import curves

_VLLM = f"vLLM {VERSION.rpartition('.')[0]}"
"""How the names of servers begin that are not too old: vLLM 0.9 is."""


def is_finished(config: RunConfig) -> bool:
    """Return whether a run's folder has all that the run writes; its model card may be missing."""
    folder = Path(config.output_dir)
    report = folder / "eval" / "report.json"
    measured = report.exists() and report.with_suffix(".md").exists()
    head = folder / "speculator"  # with a forecast if its target only trains: such a run ends with the card
    return measured or ((head / FORECAST_FILE).exists() and (head / CARD).exists())


def measure(config: RunConfig, target: Target, suites: dict[str, Suite]) -> None:
    """Tune the published head on the suite "validation", and write the report on "held-out"; what exists is kept."""
    folder = Path(config.output_dir)
    head_folder, report = folder / "speculator", folder / "eval"
    head, sampled = load_head(head_folder, target), Sampling(1.0, seed=config.seed)
    if config.eval.tune_prompts and not (head_folder / TUNED).exists():
        suite = dataclasses.replace(suites["validation"].first(config.eval.tune_prompts), name="validation")
        write_tuning(target, head, suite, head_folder / TUNED, config.eval.max_new_tokens, sampled)
    if (report / "report.json").exists():  # the run was killed between report.json and report.md
        render(read_report(report / "report.json"), [], report)
        return
    evaluate(
        target,
        head,
        [suites["held-out"]],
        report,
        Measuring(temperatures=config.eval.temperatures, max_new_tokens=config.eval.max_new_tokens, sampled=sampled),
        Compared(tuned_in=head_folder),
        speculator_name=str(head_folder),
        training=curves(folder),
    )


def target_flags(target: TargetConfig) -> list[str]:
    """Return the flags by which this project's other commands load the target of a run."""
    named = {
        "target": target.name_or_path,
        "revision": target.revision,
        "adapter": target.adapter,
        "dtype": None if target.dtype == "auto" else target.dtype,
        "chat_template_kwargs": target.chat_template_kwargs and json.dumps(target.chat_template_kwargs),
    }
    flags = [word for flag, value in named.items() if value for word in (f"--{flag}", value)]
    return [*flags, *(["--trust_remote_code"] if target.trust_remote_code else [])]


def summary(config: RunConfig) -> str:
    """Return lines about a finished run: what the head gains, where it is, and the commands that use it."""
    folder = Path(config.output_dir)
    target = config.target
    if not (folder / "eval" / "report.json").exists():  # the target only trains
        served = dataclasses.replace(target, adapter=None, dtype="auto")  # which the server decides
        return "\n".join(commands_for_server(folder / "speculator", shlex.join(target_flags(served))))
    how = shlex.join([*target_flags(target), "--speculator", str(folder / "speculator")])
    report = known_report(folder / "eval" / "report.json")
    chat = report and any(row.chat for row in report.suites) and report.settings["chat_template"]
    trial = "--chat" if chat else '--prompt "..."'
    lines = [
        *(headlines(report) if report else []),
        f"head:   {folder / 'speculator'}",
        f"report: {folder / 'eval' / 'report.html'}",
        f"try:    speculator generate {how} {trial}",
        f"serve:  speculator serve {how}",
    ]
    return "\n".join(lines)


def commands_for_server(folder: Path, target: str) -> list[str]:
    """Return lines about a head that was trained without decoding: the forecast, and how vLLM serves and measures it.

    `target` has the flags that name the target in the commands of this project.
    """
    head, expected = load_any(folder), read_json(folder / FORECAST_FILE)
    lines = [
        f"forecast of the acceptance length: {expected['acceptance_length']:.2f} ({expected['how']})",
        f"head:    {folder}",
    ]
    exported = f"{folder}-vllm"
    for layout in (layout for layout in layouts() if layout.stores(head)):
        for server in layout.servers(head.config, exported):
            if server.name.startswith(_VLLM) and server.loads:
                export = f"--speculator {shlex.quote(str(folder))} --format {layout.name}"
                measure = f"--server http://127.0.0.1:8000/v1 {target} --speculator {shlex.quote(str(folder))}"
                return [
                    *lines,
                    f"export:  speculator export {export} --output {shlex.quote(exported)}",
                    f"serve:   {server.how}",
                    f"measure: speculator eval {measure} --output {shlex.quote(f'{folder}-served')}",
                ]
    return [*lines, "vLLM loads no layout of this head; if the target fits, measure it here: speculator eval"]
