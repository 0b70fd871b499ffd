"""What the soak tests share: the good inputs of the bad ones, and a run that nothing disturbed."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from bad_inputs.conftest import cache, here, world  # noqa: F401
from soak.running import HEADS, finish, train_argv


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", autouse=True)
def _no_hub():
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def undisturbed(world, cache, tmp_path_factory):  # noqa: F811
    """`undisturbed(architecture)`: a run of such a head that nothing disturbed."""

    @functools.cache
    def run(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp("whole") / "run"
        finish(["train.py", *train_argv(world, folder, **HEADS[architecture])], cache)
        return folder

    return run


@pytest.fixture(scope="session")
def whole(undisturbed) -> Path:
    return undisturbed("mlp")
