"""Files that a run reads back, damaged one at a time: the command reports the damage or gives the same result."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_inputs.conftest import COMMANDS
from bad_inputs.damages import Damage, cut, flipped, replaced
from conftest import exit_code
from soak.running import outcome, rows_of, train_argv

SMALL = {"stage1.max_steps": 10, "stage2.max_steps": 5, "stage2.generate.max_rows": 24, "eval.max_prompts": 1}
DAMAGES: dict[str, Callable[[str], Damage]] = {
    "cut": cut,
    "flipped": flipped,
    "deleted": lambda name: replaced(name, None),
}


@dataclass(frozen=True)
class Scene:
    """A folder that a command resumes from.

    Attributes:
        argv: command for a folder.
        result: result in a folder that must be the same as without damage.
        files: pattern of the damaged files' paths in the folder.
        removed: parts of the folder that are removed, so that the command reads the rest.
    """

    argv: Callable[[Path, dict], list[str]]
    result: Callable[[Path], Any]
    files: str = ""
    removed: tuple[str, ...] = ()


def _train(folder: Path, inputs: dict) -> list[str]:
    return ["train", *train_argv(inputs, folder, **SMALL)]


def _generate(folder: Path, inputs: dict) -> list[str]:
    flags = ["--target", str(inputs["TARGET"]), "--speculator", str(inputs["MLP"]), "--sources", str(inputs["TEXT"])]
    flags += ["--prompt_tokens", "8", "--max_rows", "12", "--max_new_tokens", "8", "--batch_size", "4"]
    return ["data", "generate", *flags, "--output", str(folder)]


SCENES = {
    "run before stage 2": Scene(_train, outcome, "stage1/speculator|generated/", ("eval", "speculator", "stage2")),
    "run in stage 1": Scene(
        _train, outcome, "stage1/checkpoint", ("eval", "speculator", "stage2", "generated", "stage1/speculator")
    ),
    "generated rows": Scene(_generate, lambda folder: rows_of(folder / "rows")),
}


@pytest.mark.parametrize("name", SCENES)
def test_damage_is_reported_or_harmless(name, inputs, workdir, capfd):
    scene, whole, copy = SCENES[name], workdir / "whole", workdir / "copy"

    def run(folder: Path) -> tuple[int, str]:
        command, *argv = scene.argv(folder, inputs)
        return exit_code(COMMANDS[command], argv), capfd.readouterr().err

    def resume_with(damage: Damage) -> tuple[int, str]:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        for part in scene.removed:
            shutil.rmtree(copy / part)
        damage(copy)
        return run(copy)

    code, error = run(whole)
    assert code == 0, error
    code, error = resume_with(lambda folder: None)
    assert code == 0, error
    expected, faults = scene.result(copy), []
    paths = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    for path in paths:
        gone = any(path.startswith(f"{part}/") for part in scene.removed)
        if gone or path.endswith((".lock", "README.md")) or not re.match(scene.files, path):
            continue
        for kind, damage in DAMAGES.items():
            if not (whole / path).stat().st_size:
                continue
            code, error = resume_with(damage(path))
            # A damaged checkpoint is passed over with a warning: the next one is another result.
            warned = f"{(copy / path).parent}" in error
            if code not in (0, 2) or "Traceback" in error:
                faults.append(f"{path} {kind}: exit code {code}: {error[-150:]}")
            elif code == 0 and scene.result(copy) != expected and not warned:
                faults.append(f"{path} {kind}: another result without a warning")
    assert not faults, "\n".join(faults)
