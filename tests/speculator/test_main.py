"""One command, from any folder, and what a wheel has of the checkout."""

import os
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from speculator import workshop
from speculator.__main__ import COMMANDS, PACKAGES, main
from speculator.about import DISTRIBUTION, command_line, git_commit, processor, version_line

ROOT = Path(__file__).parents[2]


def test_without_a_command_help_is_printed_and_nothing_is_wrong(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert "train a head" in printed.out
    assert printed.err == ""


def test_the_version_has_the_commit_torch_and_the_gpus_and_imports_no_torch(tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf 'NVIDIA H100\\nNVIDIA H100\\nNVIDIA L4\\n'\n")
    fake.chmod(0o755)
    code = "import sys; from speculator.__main__ import main\n"
    code += "try: main(['--version'])\nfinally: assert 'torch' not in sys.modules"
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commit = f" ({git_commit()})" if git_commit() else ""
    begin = f"speculator {version(DISTRIBUTION)}{commit}, torch {version('torch')}, Python "
    assert done.stdout.startswith(begin)
    assert done.stdout.endswith(", 2 x NVIDIA H100, 1 x NVIDIA L4\n")


def test_the_version_names_the_processor_without_a_gpu_and_no_commit_in_a_wheel(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert version_line().endswith(processor())
    monkeypatch.undo()
    monkeypatch.setattr(workshop, "ROOT", workshop._INSTALLED)
    assert git_commit() is None


@pytest.mark.parametrize(
    ("program", "name"), [("/home/me/eval/__main__.py", "eval"), ("/usr/bin/speculator", "speculator")]
)
def test_a_report_names_the_command_and_no_folder_of_the_program(program, name, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, "--output", "out"])
    assert command_line() == [name, "--output", "out"]


@pytest.mark.parametrize("command", ["train --stage1.max_stepz 3", "data view --colour", "eval compare a b"])
def test_the_commands_run_from_a_folder_with_packages_of_the_same_names(command, tmp_path):
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "speculator", *command.split()]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr


def test_help_takes_no_library_that_takes_seconds():
    """For each command, in one process."""
    code = (
        "import sys\nfrom contextlib import suppress\nfrom speculator.__main__ import main\n"
        "for command in sys.argv[1:]:\n    with suppress(SystemExit):\n        main([*command.split(), '--help'])\n"
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *COMMANDS], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS)


def test_a_wheel_has_all_packages_inside_speculator(monkeypatch):
    given = {}
    monkeypatch.setattr("setuptools.setup", lambda **settings: given.update(settings))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert {package.partition(".")[0] for package in given["packages"]} == {"speculator"}
    for name in ("train", "data.cli", "eval", "configs", "examples.stdlib_target"):
        assert (ROOT / given["package_dir"][f"speculator._workshop.{name}"]).is_dir()
        assert f"speculator._workshop.{name}" in given["packages"]
