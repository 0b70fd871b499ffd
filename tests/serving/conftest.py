"""Environments of servers, which `make serving` builds; without them these tests are skipped, with the reason."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(name: str) -> Path:
    """The python of a server's environment."""
    folder = Path(os.environ["SPECULATOR_SERVING"]).resolve() / name
    if not (folder / "installed").exists():
        pytest.skip(f"{folder} is not there or not whole: `make serving` builds it, from PyPI")
    return folder / "bin" / "python"


def variables(more: dict[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **more}


@pytest.fixture(scope="session")
def wanted():
    """Skips before other fixtures train heads for nothing."""
    if not os.environ.get("SPECULATOR_SERVING"):
        pytest.skip("what servers make of exported heads: run by `make serving`")


@pytest.fixture(scope="session")
def run_in(wanted):
    """`run_in(environment, script, *arguments)` runs a script of this folder in a server's environment."""

    def run(name: str, script: str, *arguments: object, **more: str) -> str:
        command = [str(environment(name)), str(HERE / script), *map(str, arguments)]
        done = subprocess.run(command, env=variables(more), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture
def start_in(wanted, tmp_path):
    """`start_in(environment, *arguments)` starts python in a server's environment, which ends with the test."""
    started = []

    def start(name: str, *arguments: object, **more: str) -> tuple[subprocess.Popen, Path]:
        log = tmp_path / f"server{len(started)}.log"
        command = [str(environment(name)), *map(str, arguments)]
        with log.open("wb") as file:
            started.append(
                subprocess.Popen(command, env=variables(more), stdout=file, stderr=file, start_new_session=True)
            )
        return started[-1], log

    yield start
    for process in started:
        for stop in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, stop)
                process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def digest_of(name: str, more: tuple[str, ...] = ()) -> str:
    """Of a name and the sources that a check runs; `more` are folders beside those of all."""
    digest = hashlib.sha256(name.encode())
    for folder in ("speculator", "integrations", "tests/serving", *more):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".txt", ".toml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


@pytest.fixture
def say(request):
    """`say(line)` prints a figure. What passed with these very sources is not run again: its figures are shown."""
    root = os.environ.get("SPECULATOR_SERVING")
    lines: list[str] = []
    if not root:
        yield lines.append
        return
    digest = digest_of(request.node.nodeid, getattr(request.module, "SOURCES", ()))
    passed = Path(root).resolve() / "passed" / digest
    if passed.exists():
        pytest.skip(f"passed before: {passed.read_text()}")

    def show(line: str) -> None:
        lines.append(line)
        print(line)

    yield show
    if getattr(request.node, "whole", False):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text("; ".join(lines))


@pytest.fixture
def train(wanted, request):
    """`train(flags)` runs train.py and gives the run's folder: kept, and gone on with where it was cut off."""
    environment("vllm")  # without it there is nothing to serve by

    def run(flags: list[str]) -> Path:
        folder = Path(os.environ["SPECULATOR_SERVING"]).resolve() / "trained"
        made = folder / digest_of(" ".join(flags), request.module.SOURCES)
        for other in folder.glob("*"):
            if other != made:
                shutil.rmtree(other)
        command = [sys.executable, "train.py", "--output_dir", str(made), *flags]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0
        return made

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.whole = report.passed
    return report
