import subprocess
import sys
from pathlib import Path

import pytest

from train.config import parse

ROOT = Path(__file__).parents[2]


def refuse(argv: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("stage1:\n  max_steps: 7\n  learning_rate: 0.5\ndata:\n  sources: [a.txt, b.jsonl]\n")
    config = parse(["--config", str(file), "--stage1.max_steps", "9"])
    assert (config.stage1.max_steps, config.stage1.learning_rate) == (9, 0.5)
    assert config.data.sources == ["a.txt", "b.jsonl"]
    assert config.speculator.n_predict == parse([]).speculator.n_predict


def test_without_arguments_the_quickstart_runs():
    assert parse([]).output_dir == "runs/quickstart"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stage1.max_stepz", "20"], "did you mean stage1.max_steps?"),
        (["--stage1.max_steps", "many"], "stage1.max_steps"),
        (["--colour", "blue"], "unknown key colour"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    assert message in refuse(argv, capsys)


def test_a_mistyped_key_in_a_file_is_named_too(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("stage1:\n  max_stepz: 7\n")
    assert "unknown key stage1.max_stepz: did you mean stage1.max_steps?" in refuse(["--config", str(file)], capsys)


def test_a_mistyped_key_is_refused_before_torch_is_imported():
    """As a user types it: one line, exit 2, and none of the seconds that importing torch takes."""
    probe = "import runpy, sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); "
    probe += "sys.argv = ['train.py', '--stage1.max_stepz', '20']; runpy.run_path('train.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "train.py: unknown key stage1.max_stepz: did you mean stage1.max_steps?\n"
    assert done.stdout == "False\n"


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "Optimiser steps." in text
    assert "Hub id or local folder of a causal LM." in " ".join(text.split())
