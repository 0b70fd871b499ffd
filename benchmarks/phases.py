"""Runs of several commands, each done once: what `benchmarks.reference` is made of."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from speculator.device import hardware, resolve_device
from speculator.errors import UserError, refuse
from speculator.files import make_folder, write_text
from train.config import ROOT
from train.folder import git_commit


@dataclass(frozen=True)
class Phase:
    """A command, and what is there when it is done."""

    name: str
    product: Path
    command: list[str]
    online: bool = False  # it may look on the network


class Phases(list[Phase]):
    """Those of a run, in the order in which they are done; their products lie in `folder`."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def add(self, name: str, product: str, *command: str | int | Path, online: bool = False) -> None:
        self.append(Phase(name, self.folder / product, [str(word) for word in command], online))


def shown(file: str) -> str:
    """A file of this checkout, as it would be typed here."""
    return os.path.relpath(ROOT / file)


def call(command: list[str], online: bool = False) -> int:
    """Run Python with these arguments; gives its exit code. A SIGTERM is passed on to it."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths} | ({} if online else {"HF_HUB_OFFLINE": "1"})
    with subprocess.Popen([sys.executable, *command], env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def record(folder: Path, phase: Phase, seconds: float) -> None:
    """Add a phase to run.json: on what machine, with which versions, and by which command it was done."""
    file = folder / "run.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[phase.name] = {
        "command": " ".join(["python", *phase.command]),
        "seconds": round(seconds, 1),
        "hardware": hardware(resolve_device()),
        "versions": {"python": sys.version.split()[0], "cuda": torch.version.cuda}
        | {name: version(name) for name in ("torch", "transformers", "datasets", "accelerate")},
        "git_commit": git_commit(),
    }
    write_text(file, json.dumps(known, indent=1))


def publish(folder: Path, output: Path, patterns: Iterable[str]) -> None:
    """Copy the reports that there are."""
    for pattern in ("run.json", *patterns):
        for file in folder.glob(pattern):
            place = output / file.relative_to(folder)
            make_folder(place.parent)
            shutil.copy(file, place)


def show(table: Phases) -> None:
    """Which phases there are, and which are done."""
    print("\n".join(f"{phase.name}: {'done' if phase.product.exists() else 'to do'}" for phase in table))


def run(table: Phases, named: list[str], published: Path, patterns: Iterable[str]) -> None:
    """Do the phases that are not done, and after each copy all reports so far.

    Args:
        table: in the order in which they are done.
        named: of these alone; empty: all.
        published: where the reports are copied to.
        patterns: what is a report, within the folder.

    Raises:
        UserError: no such phase, or one that failed.
    """
    names = [phase.name for phase in table]
    for name in named:
        refuse((name not in names, f"no phase {name!r}: there are {', '.join(names)}"))
    make_folder(table.folder)
    publish(table.folder, published, patterns)  # a call that was cut off may not have
    for phase in table:
        if named and phase.name not in named:
            continue
        if phase.product.exists():
            print(f"{phase.name}: done, {phase.product}", flush=True)
            continue
        print(f"\n{phase.name}: python {' '.join(phase.command)}", flush=True)
        started = time.perf_counter()
        code = call(phase.command, phase.online)
        if code or not phase.product.exists():
            raise UserError(f"phase {phase.name} ended with exit code {code} and without {phase.product}")
        record(table.folder, phase, time.perf_counter() - started)
        publish(table.folder, published, patterns)
    print(f"\nThe reports are in {published}")
