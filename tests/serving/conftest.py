"""Environments of other servers. `make serving` builds them; without them these tests are skipped with the reason."""

import hashlib
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from serving.processes import process_group

from speculator import Target

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(name: str) -> Path:
    """Path of the python in a server's environment."""
    folder = Path(os.environ["SPECULATOR_SERVING"]).resolve() / name
    if not (folder / "installed").exists():
        pytest.skip(f"{folder} is missing or incomplete: `make serving` builds it from PyPI")
    return folder / "bin" / "python"


def environment_variables(more: dict[str, str]) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **more}


@pytest.fixture(scope="session")
def requested():
    """Skip unless `make serving` runs the tests, before other fixtures train heads."""
    if not os.environ.get("SPECULATOR_SERVING"):
        pytest.skip("runs in `make serving` only")


@pytest.fixture(scope="session")
def smollm2(requested, tmp_path_factory) -> Path:
    """Folder of SmolLM2 in float32 and safetensors."""
    name = os.environ["REFERENCE_TARGET"]
    try:
        target = Target.load(name, dtype="float32")
    except Exception as error:
        pytest.skip(f"{name} is not on this machine: {error}")
    made = tmp_path_factory.mktemp("smollm2")
    target.model.save_pretrained(made)
    target.tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def run_in(requested):
    """`run_in(environment, script, *arguments)` runs a script of this folder in a server's environment."""

    def run(name: str, script: str, *arguments: object, **more: str) -> str:
        command = [str(environment(name)), str(HERE / script), *map(str, arguments)]
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with process_group(command, env=environment_variables(more), text=True, **pipes) as process:
            output, errors = process.communicate()
        assert process.returncode == 0, output[-2000:] + errors[-4000:]
        return output

    return run


@pytest.fixture
def start_in(requested, tmp_path):
    """`start_in(environment, *arguments)` starts python in a server's environment; it ends with the test."""
    with ExitStack() as started:

        def start(name: str, *arguments: object, **more: str) -> tuple[subprocess.Popen, Path]:
            log = tmp_path / f"server{len(list(tmp_path.glob('server*.log')))}.log"
            command = [str(environment(name)), *map(str, arguments)]
            with log.open("wb") as file:
                group = process_group(command, env=environment_variables(more), stdout=file, stderr=file)
                return started.enter_context(group), log

        yield start


def digest_of(name: str, more: tuple[str, ...] = ()) -> str:
    """Checksum of a test's name and of the sources that it runs; `more` adds folders."""
    digest = hashlib.sha256(name.encode())
    for folder in ("speculator", "integrations", "tests/serving", *more):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".txt", ".toml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


@pytest.fixture
def report(request):
    """`report(line)` prints a result. A test that passed with the same sources is skipped and shows its results."""
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
    if getattr(request.node, "passed", False):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.write_text("; ".join(lines))


@pytest.fixture
def train(requested, request):
    """`train(flags)` runs train.py and returns the run's folder, which is kept; an interrupted run resumes."""
    environment("vllm")  # skip before training

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
    outcome = yield
    if outcome.when == "call":
        item.passed = outcome.passed
    return outcome
