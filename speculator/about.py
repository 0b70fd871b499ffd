"""What `speculator --version` prints: version, commit, torch and device. Importing torch would take seconds."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from speculator import workshop

DISTRIBUTION = "speculator-llm"


def version_line() -> str:
    """Return one line for a bug report: version, torch, Python and the GPUs, or the CPU without any."""
    commit = git_commit()
    own = f"speculator {version_of(DISTRIBUTION)}" + (f" ({commit})" if commit else "")
    return f"{own}, torch {version_of('torch')}, Python {platform.python_version()}, {_gpus() or processor()}"


def git_commit() -> str | None:
    """Return `git describe` of this checkout's commit ("-dirty" with changes); None in a wheel, or if git can't."""
    if workshop.is_wheel():  # what git would describe is a repository around site-packages
        return None
    return _printed("git", "-C", str(workshop.ROOT), "describe", "--always", "--dirty")


def command_line() -> list[str]:
    """Return this process's command for a report: the program by its name alone, as `eval` of `python -m eval`."""
    program = Path(sys.argv[0])
    return [program.parent.name if program.name == "__main__.py" else program.name, *sys.argv[1:]]


def processor() -> str:
    """Return the CPU's name with the family and model numbers that tell CPUs of one name apart, or its architecture."""
    with suppress(OSError):
        facts = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        if "model name" in facts:
            return f"{facts['model name'].strip()} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return platform.machine()


def _gpus() -> str:
    names = (_printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def _printed(*command: str) -> str | None:
    """Return what a program prints; None if it fails or is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
