"""What holds whatever the input: strategies and checks, for the suite (`test_properties.py`) and for long fuzz runs.

Each property is a function of drawn values that raises AssertionError; PROPERTIES has them by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import typing
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from bad_inputs.conftest import TEMPLATE
from bad_inputs.test_train import fields
from conftest import tiny_tokenizer
from hypothesis import strategies as st

from data.packing import pack
from data.rendering import render
from data.rows import KEYS, content
from data.sources import documents
from speculator.errors import UserError
from speculator.prompts import read_prompts
from speculator.sealed import MANIFEST, damage, seal
from train.command_line import parse
from train.config import RunConfig

TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = TEMPLATE
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def one_line(error: UserError, mentions: str = "") -> None:
    assert str(error).strip()
    assert "\n" not in str(error).strip()
    assert mentions in str(error)


# The config

_VALUES: dict[Any, st.SearchStrategy] = {
    int: st.integers(2, 10**6),
    float: st.floats(0.001, 0.999),
    bool: st.booleans(),
    str: st.from_regex(r"[a-z]{1,12}", fullmatch=True),
    list[str]: st.lists(st.from_regex(r"[a-z]{1,12}", fullmatch=True), min_size=1, max_size=3),
    list[int]: st.lists(st.integers(2, 1000), min_size=1, max_size=3),
    list[float]: st.lists(st.floats(0.01, 2), min_size=1, max_size=3, unique=True),
}


def values_of(kind: Any) -> st.SearchStrategy:
    if typing.get_origin(kind) is typing.Literal:
        return st.sampled_from(typing.get_args(kind))
    if kind in _VALUES:
        return _VALUES[kind]
    return st.one_of(st.none() if option is type(None) else values_of(option) for option in typing.get_args(kind))


FIELDS = fields()
SETTINGS = st.lists(st.sampled_from(sorted(FIELDS)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(FIELDS[name]) for name in names})
)


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def parsed(text: bytes) -> RunConfig | None:
    """The config in a file; None where it is refused, in one line and with exit code 2."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        file = Path(folder) / "run.yaml"
        file.write_bytes(text)
        try:
            return parse(["--config", str(file)])
        except SystemExit as stop:
            code = stop.code
    assert code == 2
    assert said.getvalue().count("\n") == 1, said.getvalue()
    return None


def a_config_comes_back_as_it_was_written(settings: dict[str, Any]) -> None:
    config = parsed(yaml.safe_dump(nested(settings)).encode())
    assert config is not None
    for name, value in settings.items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name


def any_config_is_taken_or_refused_in_one_line(value: Any) -> None:
    parsed(value if isinstance(value, bytes) else yaml.safe_dump(value).encode())


SECTIONS = st.dictionaries(
    st.sampled_from(["stage1", "stage2", "loss", "data", "seed", "target", "x"]), JSON, max_size=3
)
NAMED = st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON, max_size=3).map(nested)


# Rows

_TURN = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("role", "content", "from", "value", "tool_calls"), JSON)
) | st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=8)})
ROWS = JSON | st.dictionaries(
    st.sampled_from(KEYS), JSON | st.lists(_TURN, max_size=4) | st.lists(st.integers(-2, 9), max_size=6), max_size=3
)


def any_row_is_read_or_refused_in_one_line(row: Any) -> None:
    try:
        found = content(row, "rows.jsonl:1")
    except UserError as error:
        one_line(error, "rows.jsonl:1")
        return
    assert found
    assert set(found) <= set(KEYS)
    if "text" in found:
        assert found == {"text": row["text"]}
    if "input_ids" in found:
        assert found["input_ids"] == row["input_ids"]
        assert len(found["loss_mask"]) == len(found["input_ids"])


LINES = st.lists(st.binary(max_size=20) | ROWS.map(lambda row: json.dumps(row).encode()), max_size=4).map(b"\n".join)


def any_file_is_read_or_refused_in_one_line(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rows.jsonl", "rows.json", "rows.txt", "rows.jsonl.gz", "rows.parquet"):
            file = Path(folder) / name
            file.write_bytes(raw)
            for read in (lambda file=file: list(documents([str(file)], None)), lambda file=file: read_prompts(file)):
                try:
                    read()
                except UserError as error:
                    one_line(error)


# Chat masks

_SAID = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=20).filter(
    lambda text: bool(text.strip())
)
CHATS = st.tuples(st.none() | _SAID, st.lists(st.tuples(_SAID, _SAID), min_size=1, max_size=4), st.none() | _SAID)


def exactly_the_assistants_tokens_are_learnt(chat: tuple) -> None:
    system, turns, last = chat
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    messages += [{"role": "user", "content": last}] if last else []
    (row,) = render([{"id": "a", "where": "a:1", "messages": messages}], TOKENIZER)
    learnt = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert TOKENIZER.decode(learnt) == "".join(f"{answered}<eos>" for _, answered in turns)
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(row["input_ids"]) == whole


# Packing

DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), min_size=1, max_size=12), max_size=12)


def packing_conserves_tokens_and_keeps_documents_apart(drawn: list, length: int) -> None:
    given = [{"input_ids": [a for a, _ in each], "loss_mask": [b for _, b in each]} for each in drawn]
    rows = list(pack(given, length))
    every = list(chain.from_iterable(drawn))
    assert len(rows) == len(every) // length
    owners = [number for number, each in enumerate(drawn) for _ in each]
    for number, row in enumerate(rows):
        part = slice(number * length, (number + 1) * length)
        assert list(zip(row["input_ids"], row["loss_mask"], strict=True)) == every[part]
        own = owners[part]
        assert row["document_ids"] == [owner - own[0] for owner in own]


# Checkpoints

FILES = st.dictionaries(st.from_regex(r"[a-z]{1,6}(/[a-z]{1,6})?", fullmatch=True), st.binary(max_size=40), min_size=1)


def any_damage_to_a_checkpoint_is_seen(files: dict[str, bytes], kind: str, where: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoint-1"
        for name, raw in files.items():
            path = root / name
            if path.exists() or any(parent.is_file() for parent in path.parents):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        seal(root)
        assert damage(root) is None
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        path = paths[where % len(paths)]
        raw = bytearray(path.read_bytes())
        if kind == "delete" or not raw:
            path.unlink()
        elif kind == "cut":
            path.write_bytes(raw[: where % len(raw)])
        elif kind == "flip":
            raw[where % len(raw)] ^= 1 << where % 8
            path.write_bytes(raw)
        else:
            path.write_bytes(b"[1]")
        # A list that has changed and still fits the files does no harm.
        assert damage(root) or path.name == MANIFEST


PROPERTIES: dict[str, tuple[Callable[..., None], list[st.SearchStrategy]]] = {
    check.__name__: (check, list(drawn))
    for check, *drawn in [
        (a_config_comes_back_as_it_was_written, SETTINGS),
        (any_config_is_taken_or_refused_in_one_line, st.binary(max_size=60) | JSON | SECTIONS | NAMED),
        (any_row_is_read_or_refused_in_one_line, ROWS),
        (any_file_is_read_or_refused_in_one_line, LINES),
        (exactly_the_assistants_tokens_are_learnt, CHATS),
        (packing_conserves_tokens_and_keeps_documents_apart, DOCUMENTS, st.integers(1, 9)),
        (
            any_damage_to_a_checkpoint_is_seen,
            FILES,
            st.sampled_from(["cut", "flip", "delete", "garbage"]),
            st.integers(0, 10**6),
        ),
    ]
}
