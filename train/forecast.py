"""What a run with a target in servers can say about its head: a forecast of the acceptance, and how to measure it."""

from __future__ import annotations

import shlex
from pathlib import Path

from eval.in_server import FORECAST_FILE
from speculator.checkpoints import layouts, load_any
from speculator.checkpoints.vllm_plugin import VERSION
from speculator.files import JsonObject, read_json

_VLLM = f"vLLM {VERSION.rpartition('.')[0]}"
"""How the names of servers begin that are not too old: vLLM 0.9 is."""


def forecast(evaluation: dict[str, float]) -> JsonObject:
    """Return the teacher-forced forecast of a head's acceptance for `FORECAST_FILE`, by an evaluation's figures."""
    name, at = "walked", "the steps of decoding validation rows"
    if "eval_position0/walked" not in evaluation:  # the head trains on some positions only, and can't walk a row
        name, at = "prefix_accuracy", "positions of validation rows; less if the text is uneven"
    depth = sum(key.startswith("eval_position") and key.endswith(f"/{name}") for key in evaluation)
    rates = [evaluation[f"eval_position{i}/{name}"] for i in range(depth)]
    return {"how": f"teacher-forced, greedy, at {at}", "acceptance_length": 1 + sum(rates), "accepted_per_draft": rates}


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
