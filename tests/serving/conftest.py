"""Environments of servers, which `make serving` builds; without them these tests are skipped, with the reason."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def run_in():
    """`run_in(environment, script, *arguments)` runs a script of this folder in a server's environment."""

    def run(environment: str, script: str, *arguments: object, **variables: str) -> str:
        root = os.environ.get("SPECULATOR_SERVING")
        if not root:
            pytest.skip("what servers make of exported heads: run by `make serving`")
        python = Path(root).resolve() / environment / "bin" / "python"
        if not (Path(root) / environment / "installed").exists():
            pytest.skip(f"{python.parents[1]} is not there or not whole: `make serving` builds it, from PyPI")
        command = [str(python), str(Path(__file__).parent / script), *map(str, arguments)]
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run
