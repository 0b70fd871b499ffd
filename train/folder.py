"""Whose a run's folder is: config.yaml says, and nothing else may be overwritten."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from speculator.errors import UserError
from speculator.files import make_folder, write_text
from train.config import ROOT, RunConfig

_NOT_SETTINGS = ("output_dir", "overwrite_output_dir", "dry_run")


def _settings(config: RunConfig) -> dict[str, Any]:
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_SETTINGS}


def refuse_foreign(folder: Path, config: RunConfig) -> None:
    """Refuse a folder that holds something else than this run, finished or not."""
    record = folder / "config.yaml"
    try:
        before = yaml.safe_load(record.read_text())["settings"]
    except FileNotFoundError:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no run; choose another --output_dir") from None
        return
    except (OSError, TypeError, KeyError, yaml.YAMLError):
        raise UserError(f"{record} was not written by train.py; choose another --output_dir") from None
    difference = _first_difference(before, _settings(config))
    if difference and not config.overwrite_output_dir:
        raise UserError(f"{folder} holds a run with another {difference}; --overwrite_output_dir replaces it")


def claim(folder: Path, config: RunConfig, processes: int) -> None:
    """Make the folder this run's: drop what --overwrite_output_dir replaces, and write config.yaml."""
    record = folder / "config.yaml"
    if config.overwrite_output_dir:
        shutil.rmtree(folder, ignore_errors=True)
    if record.exists():
        return
    make_folder(folder)
    facts = {
        "settings": _settings(config),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "processes": processes,
        "python": sys.version.split()[0],
        "git_commit": git_commit(),
        "argv": sys.argv,
    }
    write_text(record, yaml.safe_dump(facts, sort_keys=False))


def _first_difference(before: Any, now: Any, path: str = "") -> str | None:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            found = _first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return None
    return None if before == now else f"{path} ({before}, not {now})"


def git_commit() -> str | None:
    """What this checkout is at; None where git can't say."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
