"""Complete checkpoints of a stage: those whose manifest of checksums, written last, is right."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from speculator.errors import UserError, first_line
from speculator.files import manifest_error

METRIC = "eval_forecast_acceptance_length"
"""Chooses the best checkpoint: thousands of labels tell checkpoints apart that a few decoded prompts can't."""
DECODED = "eval_acceptance_length"
"""The acceptance length of real decoding, where this process decodes the target."""
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def numbered(stage: Path) -> dict[int, Path]:
    """Map the steps of a stage's checkpoints to their folders, the newest first."""
    found = {match[1]: path for path in stage.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return {int(step): found[step] for step in sorted(found, key=int, reverse=True) if found[step].is_dir()}


def _first_whole(folders: list[Path]) -> tuple[Path | None, list[str]]:
    """Return the first complete checkpoint (None: all are damaged), and a message for each damaged one before it."""
    passed_over: list[str] = []
    for folder in folders:
        problem = manifest_error(folder)
        if problem is None:
            return folder, passed_over
        passed_over.append(f"skipping {folder}: {problem}")
    return None, passed_over


def newest(stage: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint (None: there is none), and a message for each newer, damaged one."""
    return _first_whole(list(numbered(stage).values()))


def best(
    stage: Path, history: list[dict[str, float]], save_steps: int, max_steps: int
) -> tuple[Path | None, list[str]]:
    """Return the planned, complete checkpoint with the highest `METRIC` (None: there is none); the earliest wins a tie.

    Returns also a message for each better, damaged one. One saved on a signal is not planned, so that it doesn't change
    the result. `history` is the log of evaluations in trainer_state.json; `max_steps` are the steps of the whole stage.
    """
    figures = {entry["step"]: entry[METRIC] for entry in history if METRIC in entry}
    there = numbered(stage)
    steps = [step for step in there if step in figures and planned(step, save_steps, max_steps)]
    # The highest metric first, and of equal ones the earliest step.
    return _first_whole([there[step] for step in sorted(steps, key=lambda step: (-figures[step], step))])


def planned(step: int, save_steps: int, max_steps: int) -> bool:
    """Return whether an uninterrupted run saves a checkpoint at this step."""
    return step % save_steps == 0 or step == max_steps


def rotate(stage: Path, limit: int, best_step: int | None, newest_step: int) -> None:
    """Keep `limit` checkpoints: the best (if known), and the newest up to `newest_step`, as later ones are damaged."""
    there = numbered(stage)
    # The best one, then the newest: a run resumes from the newest, and publishes the best.
    kept = [best_step] * (best_step in there)
    kept += [step for step in there if step != best_step and step <= newest_step][: limit - len(kept)]
    killed = stage.glob("checkpoint-*.partial")
    for folder in (*killed, *(there[step] for step in there.keys() - set(kept))):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def reporting_full_disk(path: Path) -> Iterator[None]:
    """Turn any library's error about a full or failing disk into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM and "disk space" not in str(error):
            raise
        reason = error.strerror or first_line(error)
        raise UserError(f"can't write {error.filename or path}: {reason}; the same command resumes from here") from None
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch.save's writer
            raise
        reason = "the disk is full or failing" if isinstance(error, RuntimeError) else first_line(error)
        raise UserError(f"can't write {path}: {reason}; the same command resumes from here") from None
