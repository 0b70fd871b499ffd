"""Commands of a user without a home folder that can be written to, in a shell that kept the RANK of a launcher."""

from __future__ import annotations

import re
import shlex

import pytest
from bad_inputs.conftest import COMMANDS
from conftest import exit_code

SIZES = "--data.seq_length 64 --stage1.max_steps 1 --stage2.max_steps 0 --eval.max_new_tokens 8 --output_dir run"


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/dev/null/none")
    monkeypatch.setenv("RANK", "1")
    for name in ("SPECULATOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("speculator generate --target TARGET --prompt x --max_new_tokens 2", "acceptance length"),
        ("speculator export --speculator MLP --format native --output out", ""),
        ("speculator inspect MLP", ""),
        ("data view CHATS --target TARGET --rows 1", "there are more rows"),
        ("data generate --target TARGET --prompts PROMPTS --max_new_tokens 2 --output out", "2 rows read"),
        ("data prepare --target TARGET --sources CHATS --seq_length 64 --output out", "SPECULATOR_CACHE"),
        (f"train --target.name_or_path TARGET --data.sources [CHATS] --config PLAIN {SIZES}", "SPECULATOR_CACHE"),
    ],
)
def test_a_command_works_without_a_cache_or_asks_for_one(command, line, homeless, inputs, capfd, tmp_path):
    named = re.compile(rf"\b({'|'.join(inputs)})\b")
    name, *argv = shlex.split(named.sub(lambda match: str(inputs[match[0]]), command))
    needs_cache = line == "SPECULATOR_CACHE"
    assert exit_code(COMMANDS[name], argv) == (2 if needs_cache else 0)
    assert line in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * ("--output" in argv and not needs_cache)
