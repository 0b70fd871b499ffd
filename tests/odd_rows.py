"""Rows of every format with one odd value in each place, and what commands say of the rows that they read."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from chat_templates import CHATML

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "Hm.", "weight": 1, "train": True},
    {"role": "tool", "content": "22", "tool_call_id": "1", "name": "f"},
    {"role": "assistant", "content": "In Rome."},
]
GOOD = [
    {"messages": MESSAGES, "tools": [TOOL], "category": "a"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}]},
    {"conversation": MESSAGES[1:2] + MESSAGES[4:]},
    {"prompt": "def f(x):", "completion": " return x", "label": True},
    {"prompt": MESSAGES[1:2], "chosen": MESSAGES[4:], "rejected": MESSAGES[4:]},
    {"instruction": "Say hi.", "input": "", "output": "Hi.", "system": "Be brief."},
    {"input": MESSAGES[1:2], "output": "Hello."},
    {"instruction": "Say hi.", "context": "x", "response": "Hi."},
    {"text": "Any text that is long enough to be cut."},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "document_ids": [0, 0, 1]},
    {"turns": ["One?", "Two?"], "category": "b"},
    {"question": "How many?", "category": "b"},
]
ODD = [None, 7, 0.5, True, "text", "\ud800", "", "[", [], [None], [[]], ["a"], {}, {"a": 1}, {"function": 5}]

CALLS = "{{ tools | tojson if tools }}" + CHATML.replace(
    "{{ m.content }}", "{{ m.reasoning }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
)
"""A chat template that writes tools, thoughts and calls."""


def places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yield the path to every value inside a row."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def with_odd_values(rows: Sequence[dict] = GOOD, values: Sequence[Any] = ODD) -> Iterator[Any]:
    """Yield each row with one of its values, at any depth, replaced by each of the odd ones."""
    for row in rows:
        for *outer, key in places(row):
            for value in values:
                changed = holder = copy.deepcopy(row)
                for step in outer:
                    holder = holder[step]
                holder[key] = value
                yield changed


def write(path, rows) -> str:
    """Write a .jsonl file and return its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said_of_rows(text: str) -> dict[str, tuple[int, int, int]]:
    """Return what the lines of a command say: {name of the rows: (read, used, left out)}; no name comes twice."""
    found = re.findall(r"^(.*): ([\d,]+) rows read, ([\d,]+) used(?:, ([\d,]+) left out: (.*))?$", text, re.MULTILINE)
    assert found, text
    said = {}
    for name, *numbers, reasons in found:
        read, used, left_out = (int(number.replace(",", "") or 0) for number in numbers)
        assert name not in said, text
        assert left_out == sum(int(each.replace(",", "")) for each in re.findall(r"(?:^|; )([\d,]+) x ", reasons))
        said[name] = read, used, left_out
    return said
