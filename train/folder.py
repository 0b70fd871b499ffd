"""The folder of a run: its lock, and config.yaml, which says what a resumed run must have in common with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import yaml

from speculator import files
from speculator.about import command_line, git_commit
from speculator.errors import UserError
from speculator.files import is_partial, make_folder, read_text, write_text
from speculator.report import RunRecord
from speculator.terminal import log
from train.options.config import RunConfig

_RECORD = "config.yaml"
_LOCK = ".lock"
_ACCUMULATION = "gradient_accumulation_steps"
_FREE = ("speculator.options", "target.chat_template_kwargs")
"""Settings whose keys the user chooses."""
_NOT_SETTINGS = ("output_dir", "overwrite_output_dir", "dry_run", "plan")


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that the result of a run depends on, as YAML values."""
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in _NOT_SETTINGS}
    del settings["data"]["num_proc"]
    for stage in ("stage1", "stage2"):
        del settings[stage]["keep_states"]
    # Any servers of the target will do, so their addresses do not matter.
    settings["target"]["server"] = bool(settings["target"]["server"])
    return settings


def check_same_run(folder: Path, config: RunConfig, processes: int) -> None:
    """Raise a UserError unless the folder is new, or holds this run, finished or not.

    Another run may be there with `overwrite_output_dir`. A run stays the same if `report_to` changes, or stage 2 before
    its text is generated. Another number of processes needs a `gradient_accumulation_steps` that keeps the rows per
    optimiser step.
    """
    record = folder / _RECORD
    if not record.exists():
        # A folder with nothing but a lock and unfinished files counts as empty.
        is_free = folder.is_dir() and all(is_partial(path) or path.name == _LOCK for path in folder.iterdir())
        if folder.exists() and not is_free:
            raise UserError(f"{folder} is not empty and holds no run; choose another --output_dir")
        return
    found, now = _read(record), _settings(config)
    before = found["settings"]
    before["target"].setdefault("server", False)  # older records have it only with servers
    free = ["report_to"]
    if not (has_text(folder) or any((folder / name).exists() for name in ("stage2", "speculator"))):
        free.append("stage2")
    before |= {name: now[name] for name in free}
    for stage in ("stage1", "stage2"):
        # 4 steps on 2 processes are the rows of 8 steps on 1: the product counts. A stage of epochs compares its steps
        # with those of its checkpoint itself: the record may have the processes of a start that it refused.
        steps = now[stage][_ACCUMULATION]
        done = any((where / "speculator").exists() for where in (folder / stage, folder))
        same_rows = before[stage][_ACCUMULATION] * found["processes"] == steps * processes
        if same_rows or (now[stage]["epochs"] and not done):
            before[stage][_ACCUMULATION] = steps
    difference = _first_difference(before, now)
    if difference and not config.overwrite_output_dir:
        again = f"; to write the text of stage 2 again, remove {folder}/generated and {folder}/stage2"
        unused = next(path for n in count(2) if not (path := folder.with_name(f"{folder.name}-{n}")).exists())
        raise UserError(
            f"{folder} holds a run with another {difference}; choose another --output_dir, such as "
            f"{unused}; --overwrite_output_dir deletes the run that is there"
            + again
            * (difference.startswith("stage2") and not (folder / "speculator").exists())
        )


def has_text(folder: Path) -> bool:
    """Return whether a run's folder holds text for stage 2: a batch at least, not only the record of its settings."""
    files = (path.name for path in (folder / "generated").rglob("*") if path.is_file())
    return any(name not in ("record.json", "lock") for name in files)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a run's folder and lock it for the block; raise a UserError if another process has locked it."""
    make_folder(folder)
    busy = f"{folder}: another process is running this; wait for it, or choose another --output_dir"
    with files.locked(folder / _LOCK, busy):
        yield


def _read(record: Path) -> RunRecord:
    """Return the content of config.yaml; raise a UserError if it is damaged or no run's."""
    try:
        read = yaml.safe_load(read_text(record))
        sections = [read["settings"][name] for name in ("target", "stage1", "stage2")]
        tables = [*sections, read["settings"]["speculator"]["options"]]
        known = all(isinstance(table, dict) for table in tables) and isinstance(read["processes"], int)
        if not known or not isinstance(read["argv"], list):
            raise TypeError(record)
    except (UserError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        raise UserError(f"{record} was not written by train.py, or is damaged; choose another --output_dir") from None
    return read


def write_record(folder: Path, config: RunConfig, processes: int, fingerprints: dict[str, str] | None = None) -> None:
    """Write config.yaml into a new run's folder, or update that of a resumed run.

    With `overwrite_output_dir` the folder is emptied before. Raises a UserError if an input has changed since the run
    began. `fingerprints` has those of the inputs, by name.
    """
    record = folder / _RECORD
    if config.overwrite_output_dir:
        _empty(folder)
    now: RunRecord = {"settings": _settings(config), "processes": processes}
    if record.exists():
        begun = _read(record)
        before = begun["fingerprints"]
        changed = [name for name, value in (fingerprints or {}).items() if before.get(name, value) != value]
        if changed:
            raise UserError(
                f"{folder}: changed since this run began: {', '.join(changed)}; --overwrite_output_dir starts again"
            )
        if begun | now != begun:
            if not has_text(folder):  # the record of its settings may be that of others
                shutil.rmtree(folder / "generated", ignore_errors=True)
            was, has = _rows_per_step(begun), _rows_per_step(now)
            if others := [f"{has[s]} in {s}, before {was[s]}" for s in has if was.get(s, has[s]) != has[s]]:
                log(f"{folder}: rows per optimiser step changed: {', '.join(others)}")
            write_text(record, yaml.safe_dump(begun | now, sort_keys=False))
        return
    make_folder(folder)
    facts: RunRecord = {
        **now,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "python": sys.version.split()[0],
        "git_commit": git_commit(),
        "argv": command_line(),
        "fingerprints": fingerprints or {},
    }
    write_text(record, yaml.safe_dump(facts, sort_keys=False))


def _rows_per_step(record: RunRecord) -> dict[str, int]:
    """Return the rows per optimiser step, over all processes, by stage; stages that the run skips are left out."""
    stages = {name: own for name in ("stage1", "stage2") if (own := record["settings"][name])["max_steps"]}
    rows = {name: own["per_device_train_batch_size"] * own[_ACCUMULATION] for name, own in stages.items()}
    return {name: count * record["processes"] for name, count in rows.items()}


def _empty(folder: Path) -> None:
    """Delete a folder's content, config.yaml last: if this is interrupted, the folder still counts as a run's."""
    try:
        for path in sorted(folder.iterdir() if folder.exists() else (), key=lambda path: path.name == _RECORD):
            if path.name == _LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise UserError(f"can't replace {folder}: {error.filename}: {error.strerror}") from None


def rows_fingerprint(rows: datasets.Dataset) -> str:
    """Return 16 hexadecimal digits of a hash over all columns of the rows."""
    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for name in table.column_names:
            column = table[name].combine_chunks()
            digest.update(name.encode())
            digest.update(column.value_lengths().to_numpy())
            digest.update(values := column.flatten().to_numpy())
            if name == "loss_mask" and "rejected" not in table.column_names:
                # Rows had marks of rejected drafts next, usually none: runs that began with them resume.
                digest.update(b"rejected")
                digest.update(column.value_lengths().to_numpy())
                digest.update(np.zeros_like(values))
    return digest.hexdigest()[:16]


def prompts_fingerprint(prompts: list[list[int]]) -> str:
    """Return 16 hexadecimal digits of a hash over the tokens of all prompts."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def _first_difference(before: Any, now: Any, path: str = "") -> str | None:
    """Describe the first setting that differs, as "stage1.max_steps (100, not 200)"; None if all are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            name = f"{path}.{key}" if path else key
            if key not in now and path not in _FREE:
                return f"{name}, which this version does not have"
            found = _first_difference(before.get(key), now.get(key), name)
            if found:
                return found
        return None
    return None if before == now else f"{path} ({before}, not {now})"
