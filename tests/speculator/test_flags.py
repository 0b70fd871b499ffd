"""Parsers import no library that takes seconds, and offer what the code has."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from data.magpie import ROWS
from data.writers.engine import BATCH_SIZE
from data.writers.server import CONCURRENCY
from eval import flags as eval_flags
from speculator.__main__ import COMMANDS, build_parser
from speculator.checkpoints import FORMATS
from speculator.checkpoints.layout import DTYPES
from speculator.cli import shared_flags as flags
from speculator.cli.serve import KEY_VARIABLE
from speculator.clients.vllm_updates import LAYOUTS
from speculator.decoding import verify
from speculator.heads import ARCHITECTURES, SpeculatorConfig
from train import command_line, server_command

_ALL_PARSERS = """
import sys
from speculator.__main__ import COMMANDS, build_parser
from train import command_line
from train import server_command
for parser in (*map(build_parser, COMMANDS), command_line.build_parser(), server_command.build_parser()):
    parser.format_help()
print([name for name in ("torch", "transformers", "datasets", "openai", "matplotlib") if name in sys.modules])
"""


def test_no_parser_imports_a_large_library():
    assert subprocess.check_output([sys.executable, "-c", _ALL_PARSERS], text=True) == "[]\n"


def _choices(command: str, flag: str) -> set[str]:
    return set(next(each.choices for each in build_parser(command)._actions if flag in each.option_strings))


def test_the_choices_of_flags_are_those_of_the_code():
    assert flags.RULES == verify.RULES
    assert eval_flags.CHAIN_RULES == verify.CHAIN_RULES
    assert _choices("export", "--format") == set(FORMATS)
    assert _choices("export", "--dtype") == _choices("dequantise", "--dtype") == set(DTYPES)
    assert _choices("adapt", "--layout") == set(LAYOUTS)


@pytest.mark.parametrize(
    ("command", "flag", "values"),
    [
        ("data prepare --target t --seq_length 8 --output o", "sources", ["a.jsonl@0.7", "b.jsonl@0.3"]),
        ("data generate --target t --output o", "sources", ["a.jsonl", "b.jsonl"]),
        ("data generate --target t --output o --prompts p", "server", ["http://a", "http://b"]),
        ("data generate --target t --output o --prompts p", "temperature", [0.0, 1.0]),
        ("serve --target t", "allowed_origins", ["http://a", "http://b"]),
    ],
)
def test_a_flag_of_several_values_may_be_repeated(command, flag, values):
    name = " ".join(command.split()[:2]) if command.startswith("data") else command.split()[0]
    given = command.removeprefix(name).split() + [word for value in values for word in (f"--{flag}", str(value))]
    assert getattr(build_parser(name).parse_args(given), flag) == values


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("data generate", f"{ROWS} for self"),
        ("data generate", f"(default: {BATCH_SIZE}), or concurrent requests per server (default: {CONCURRENCY})"),
        ("serve", f"default: ${KEY_VARIABLE}"),
        ("adapt", f"default: ${KEY_VARIABLE}"),
    ],
)
def test_help_states_the_defaults_of_the_code(command, text):
    assert text in " ".join(build_parser(command).format_help().split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_describes_itself(command):
    assert len(build_parser(command).description) > 20


def surface() -> set[str]:
    """Return the flags of every command, the settings of a run, and the fields of the heads' configs."""
    parsers = {f"speculator {name}": build_parser(name) for name in COMMANDS}
    parsers["speculator server-command"] = server_command.build_parser()
    parsers["train.py"] = command_line.build_parser()
    found = {
        f"{command} {flag}"
        for command, parser in parsers.items()
        for action in parser._actions
        for flag in action.option_strings or [action.dest.upper()]
    }
    shared = {field.name for field in fields(SpeculatorConfig)} - {field.name for field in fields(PreTrainedConfig)}
    found |= {f"heads {name}" for name in shared}
    for architecture, head in ARCHITECTURES.items():
        found |= {f"heads.{architecture} {option}" for option in head.config_class.own_options()}
    return found


def test_a_new_flag_or_setting_is_a_decision():
    """Users type and store these names. To add or remove one, edit the list and the changelog too."""
    listed = set((Path(__file__).parents[1] / "surface.txt").read_text().splitlines())
    assert surface() - listed == set(), "new: add to tests/surface.txt"
    assert listed - surface() == set(), "gone: remove from tests/surface.txt"
