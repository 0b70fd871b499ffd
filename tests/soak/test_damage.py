"""Every file that a command reads back, cut, flipped, deleted or replaced: refused, named, or the same result.

Weights of a target or a head from elsewhere carry no checksums, so a bit that flips in them can't be seen: those are
cut, deleted and replaced only. What this project writes for itself (runs, caches, generated rows) is flipped as well.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs.conftest import COMMANDS
from bad_inputs.refusal import within
from soak.running import outcome, rows_of, sha, train_argv

SMALL = {"stage1.max_steps": 10, "stage2.max_steps": 5, "stage2.generate.max_rows": 24, "eval.max_prompts": 1}
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "flipped": lambda raw: raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :],
    "deleted": lambda raw: None,
    "replaced": lambda raw: b"\xff\xfe garbage",
}


def command(argv: list[str], capfd) -> tuple[int, str]:
    """Run a command in this process; gives its exit code and stderr."""
    threads = torch.get_num_threads()
    capfd.readouterr()
    with within(seconds=200, room=8 << 30):
        try:
            code = COMMANDS[argv[0]](argv[1:])
        except SystemExit as stop:
            code = stop.code
    torch.set_num_threads(threads)
    return code, capfd.readouterr().err


@dataclass(frozen=True)
class Scene:
    """A folder that a command reads back.

    Attributes:
        argv: the command, given the folder.
        result: what it must give again, given the folder.
        files: which files are damaged, by a pattern of their path in the folder.
        before: what is removed, so that the command reads the rest.
        flips: whether a flipped bit has to be seen.
    """

    argv: Callable[[Path, dict], list[str]]
    result: Callable[[Path], Any]
    files: str = ""
    before: tuple[str, ...] = ()
    flips: bool = True


def _train(folder: Path, world: dict) -> list[str]:
    return ["train", *train_argv(world, folder, **SMALL)]


def _generate(folder: Path, world: dict) -> list[str]:
    flags = ["--target", str(world["TARGET"]), "--speculator", str(world["MLP"]), "--sources", str(world["TEXT"])]
    flags += ["--prompt_tokens", "8", "--max_rows", "12", "--max_new_tokens", "8", "--batch_size", "4"]
    return ["data", "generate", *flags, "--output", str(folder)]


def _prepare(folder: Path, world: dict) -> list[str]:
    shutil.rmtree(folder.parent / "rows", ignore_errors=True)
    flags = ["--target", str(world["TARGET"]), "--sources", str(world["TEXT"]), "--seq_length", "32"]
    return ["data", "prepare", *flags, "--output", str(folder.parent / "rows")]


def _text(target: str) -> Callable[[Path, dict], list[str]]:
    def argv(folder: Path, world: dict) -> list[str]:
        where = {"--target": world["TARGET"], "--speculator": world["MLP"], target: folder}
        flags = [word for flag, path in where.items() for word in (flag, str(path))]
        return ["speculator", "generate", *flags, "--prompt", "def f", "--output", str(folder.parent / "out.jsonl")]

    return argv


def _said(folder: Path) -> str:
    return sha(folder.parent / "out.jsonl")


def _evaluated(folder: Path) -> Any:
    return {name: value for name, value in outcome(folder).items() if name in ("head", "report")}


SCENES = {
    "run before its evaluation": Scene(_train, _evaluated, "speculator/|config.yaml", ("eval",)),
    "run before stage 2": Scene(_train, outcome, "stage1/speculator|generated/", ("eval", "speculator", "stage2")),
    "run in stage 1": Scene(
        _train, outcome, "stage1/checkpoint", ("eval", "speculator", "stage2", "generated", "stage1/speculator")
    ),
    "generated rows": Scene(_generate, lambda folder: rows_of(folder / "rows")),
    "prepared cache": Scene(_prepare, lambda folder: rows_of(folder.parent / "rows")),
    "target": Scene(_text("--target"), _said, flips=False),
    "head": Scene(_text("--speculator"), _said, flips=False),
}


@pytest.fixture(scope="module")
def originals(world, tmp_path_factory) -> dict[str, Path]:
    """For each scene the undamaged folder; made on first use."""
    root = tmp_path_factory.mktemp("originals")
    return {"": root, "target": world["TARGET"], "head": world["MLP"]}


def original(name: str, originals: dict, world: dict, monkeypatch, capfd) -> Path:
    kind = "run" if name.startswith("run") else name
    if kind not in originals:
        folder = originals[""] / kind.replace(" ", "_")
        if kind == "prepared cache":
            monkeypatch.setenv("SPECULATOR_CACHE", str(folder))
        code, said = command(SCENES[name].argv(folder, world), capfd)
        assert code == 0, said
        originals[kind] = folder
    return originals[kind]


@pytest.mark.parametrize("name", SCENES)
def test_damage_is_seen_or_does_no_harm(name, originals, world, here, monkeypatch, capfd):
    scene = SCENES[name]
    whole = original(name, originals, world, monkeypatch, capfd)
    tries, faults, refused = 0, [], 0

    def folder_of(path: str) -> Path:
        return (here / "copy" / path).parent

    def attempt(damaged: str | None, change: Callable[[bytes], bytes | None]) -> tuple[int, str, Any]:
        folder = here / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        (here / "out.jsonl").unlink(missing_ok=True)
        shutil.copytree(whole, folder)
        for part in scene.before:
            shutil.rmtree(folder / part)
        if damaged:
            path = folder / damaged
            made = change(path.read_bytes())
            path.unlink() if made is None else path.write_bytes(made)
        if name == "prepared cache":
            monkeypatch.setenv("SPECULATOR_CACHE", str(folder))
        code, said = command(scene.argv(folder, world), capfd)
        return code, said, scene.result(folder) if code == 0 else None

    code, said, expected = attempt(None, bytes)
    assert code == 0, said
    paths = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    for path in paths:
        gone = any(path.startswith(f"{part}/") for part in scene.before)
        if gone or path.endswith((".lock", "README.md")) or not re.match(scene.files, path):
            continue
        for kind, change in DAMAGES.items():
            if (kind == "flipped" and not scene.flips) or not (whole / path).stat().st_size:
                continue
            tries += 1
            try:
                code, said, found = attempt(path, change)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                faults.append(f"{path} {kind}: {type(error).__name__} {error!s:.150}")
                continue
            # A damaged checkpoint may have been the best: the next best is then, and a line says so.
            last = (said.strip().splitlines() or [""])[-1]
            refused += code == 2
            if code not in (0, 2) or "Traceback" in said:
                faults.append(f"{path} {kind}: exit code {code}, {last[:150]}")
            elif code == 0 and found != expected and f"passing over {folder_of(path)}" not in said:
                faults.append(f"{path} {kind}: another result, and exit code 0: {last[:150]}")
            elif code == 2 and not last.startswith(("train.py:", "data ", "speculator:")):
                faults.append(f"{path} {kind}: not one line: {last[:150]}")
    print(f"{name}: {tries} damages, {refused} refused, {tries - refused - len(faults)} without harm", flush=True)
    assert not faults, "\n".join([f"{len(faults)} of {tries}:", *faults])
