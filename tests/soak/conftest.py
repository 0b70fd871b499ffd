"""Fixtures of the soak tests: the good inputs of `bad_inputs`, and runs that nothing interrupted."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from bad_inputs.conftest import cache, inputs, workdir  # noqa: F401
from soak.running import HEADS, finish, train_argv


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", autouse=True)
def _no_hub():
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def uninterrupted(inputs, cache, tmp_path_factory):  # noqa: F811
    """`uninterrupted(architecture)`: the folder of a run of such a head that nothing interrupted."""

    @functools.cache
    def run(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        finish(["train.py", *train_argv(inputs, folder, **HEADS[architecture])], cache)
        return folder

    return run
