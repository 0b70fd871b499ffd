"""The suite has a home folder of its own: it neither reads nor writes the caches and settings of the user."""

import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import matplotlib
import pytest

from speculator.files import cache_folder

FOLDERS = {
    "home": Path.home,
    "step costs": cache_folder,
    "hub": lambda: huggingface_hub.constants.HF_HOME,
    "datasets": lambda: datasets.config.HF_CACHE_HOME,
    "matplotlib": matplotlib.get_cachedir,
}


@pytest.mark.parametrize("what", FOLDERS)
def test_no_library_finds_the_users_home(what):
    assert "home-of-tests-" in str(FOLDERS[what]())


def test_commands_that_tests_start_have_this_home_too():
    found = subprocess.check_output([sys.executable, "-c", "import pathlib; print(pathlib.Path.home())"], text=True)
    assert Path(found.strip()) == Path.home()
