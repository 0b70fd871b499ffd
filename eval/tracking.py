"""Log a report's figures to a tracker, and its plots to wandb.

Nothing leaves the machine unless the user asks: the trackers other than wandb write to local files by default.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from speculator import terminal
from speculator.errors import UserError, first_line, refuse
from speculator.report import Report, ReportRow
from speculator.workshop import is_installed

PROJECT = "speculator"  # of trackio, mlflow and, by default, wandb
Tracker = Literal["wandb", "tensorboard", "trackio", "mlflow", "none"]
_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in mlflow's names


def check(report_to: str) -> None:
    """Raise a UserError before the measurements if the tracker's package is not installed."""
    missing = report_to != "none" and not is_installed(report_to)
    refuse((missing, f"--report_to {report_to}: {report_to} is not installed: pip install {report_to}"))
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would upload how it is used


def send(report: Report, folder: Path, report_to: str) -> None:
    """Log the figures of a report to a new run, named after its folder, of the tracker `report_to`, unless "none"."""
    if report_to == "wandb":
        start(folder, name=folder.name, job_type="eval")
        log(report, folder)
        stop()
    elif report_to != "none":
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        named = {"tensorboard": "logging_dir", "trackio": "name", "mlflow": "run_name"}
        name = str(folder) if report_to == "tensorboard" else folder.name
        tracker: Any = LOGGER_TYPE_TO_CLASS[report_to](PROJECT, **{named[report_to]: name})
        tracker.start()
        tracker.log({_FORBIDDEN.sub("_", name): value for name, value in figures(report).items()})
        tracker.finish()


def start(folder: Path, begin: Callable[..., object] | None = None, **facts: Any) -> None:
    """Start a wandb run whose files are in a folder. Nothing is uploaded, unless WANDB_MODE is online.

    `facts` are arguments of `wandb.init`, or of `begin`, which calls it; the variables WANDB_MODE, WANDB_DISABLED and
    WANDB_PROJECT take precedence.
    """
    import wandb

    off = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes", "on")
    mode: Any = "disabled" if off else os.environ.get("WANDB_MODE", "offline")  # wandb checks it
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    try:
        (begin or wandb.init)(
            project=project, dir=str(folder), mode=mode, settings=wandb.Settings(silent=True), **facts
        )
    except wandb.Error as error:
        raise UserError(f"WANDB_MODE={mode}: wandb: {first_line(error)}") from None
    if wandb.run is not None and wandb.run.settings.mode == "offline":
        place = Path(wandb.run.dir).parent  # of the files
        terminal.log(f"wandb: offline, nothing is uploaded; to upload this run: wandb sync {place}")


def stop() -> None:
    """Finish the current wandb run, if any."""
    wandb = sys.modules.get("wandb")
    if wandb is not None:
        wandb.finish()


def is_on() -> bool:
    """Return whether a wandb run is open in this process."""
    wandb = sys.modules.get("wandb")
    return wandb is not None and wandb.run is not None


def log(report: Report, folder: Path) -> None:
    """Log a report's figures, and its plots (.png) in the folder, to the current wandb run, if any."""
    if not is_on():
        return
    import wandb

    from eval.report import plots

    drawn = [file for name in sorted(plots(report)) if (file := folder / f"{name}.png").exists()]
    wandb.log({**figures(report), **{f"eval/{file.stem}": wandb.Image(str(file)) for file in drawn}})


def figures(report: Report) -> dict[str, float]:
    """Return a report's figures by name, such as "eval/SUITE T=0/head 4/acceptance_length"."""
    return {f"eval/{name}": value for row in report.suites for name, value in _figures(row).items()}


def _figures(row: ReportRow) -> dict[str, float]:
    """Return a row's figures by name, without "eval/"; {} for plain decoding."""
    if row.drafter == "none":
        return {}
    batch = f" batch {row.batch_size}" if row.batch_size > 1 else ""
    where = f"{row.name} T={row.temperature:g}{batch}/{row.drafter} {row.num_speculative_tokens}"
    figures = {
        "acceptance_length": row.acceptance_length,
        "tokens_per_second": row.tokens_per_second["speculative"],
        "predicted_speedup": row.predicted_speedup,
        **{f"speedup over {name}": ratio.value for name, ratio in row.speedup.items()},
        **{f"acceptance {i + 1}": value for i, value in enumerate(row.acceptance_by_position)},
    }
    return {f"{where}/{name}": value for name, value in figures.items()}
