"""The inputs that are good, made once and shared by all cases, and the check that all refusals go through."""

from __future__ import annotations

import json
import re
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from bad_inputs.refusal import Case, HungError, TakenError, fifo, listing, make, within
from conftest import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import data.__main__
import eval.__main__
import speculator.__main__
import train.command_line
import train.run
from speculator.heads import ARCHITECTURES

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SIZES = dict(  # noqa: C408
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def _train(argv: list[str]) -> int:
    return train.run.main(train.command_line.parse(argv))


_BAR = re.compile(r"\d\S*/s\]|\?\S*/s\]|it/s\]")  # a progress bar, of work that had begun

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "data": data.__main__.main,
    "eval": eval.__main__.main,
    "speculator": speculator.__main__.main,
}


@pytest.fixture(scope="session")
def world(tmp_path_factory, text_file) -> dict[str, Path]:
    """Good inputs by the words that stand for them."""
    root = tmp_path_factory.mktemp("good")
    paths = {name: root / name.lower() for name in ("TARGET", "PLAIN", "MLP", "LSTM")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=0)).save_pretrained(paths["TARGET"])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(paths["TARGET"])
    shutil.copytree(paths["TARGET"], paths["PLAIN"])  # a target without a chat template
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(paths["TARGET"])
    for architecture in ("mlp", "lstm"):
        head = ARCHITECTURES[architecture]
        head(head.config_class(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(
            paths[architecture.upper()]
        )
    chats = [
        {"messages": [{"role": "user", "content": f"Why {i}?"}, {"role": "assistant", "content": f"Because {i}."}]}
        for i in range(300)
    ]
    for name, rows in {"CHATS": chats, "PROMPTS": [{"prompt": "import os"}, {"prompt": "def f"}]}.items():
        paths[name] = root / f"{name.lower()}.jsonl"
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths["TEXT"] = root / "text.jsonl"
    shutil.copyfile(text_file, paths["TEXT"])
    paths["REPORT"] = root / "report.json"
    shutil.copyfile(ROOT / "docs" / "quickstart" / "report.json", paths["REPORT"])
    return paths


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(tmp_path, world, cache, monkeypatch) -> Path:
    """An empty folder to work in, on a machine without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECULATOR_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(cache / "no_token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(cache / "no_token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return tmp_path


@pytest.fixture
def refused(here, world, cache, monkeypatch, capfd) -> Callable[[Case], None]:
    """Run a case's command and hold its refusal to what all refusals are held to."""

    claim = train.run.claim

    def taken(*arguments: Any, **named: Any) -> None:
        claim(*arguments, **named)
        raise TakenError

    monkeypatch.setattr("train.run.claim", taken)

    def check(case: Case) -> None:
        make(here, {"pipe": fifo, **case.files})
        before = listing(here, world["TARGET"].parent)
        named = re.compile(rf"\b({'|'.join(world)})\b")
        command, *argv = (named.sub(lambda match: str(world[match[0]]), word) for word in case.argv)
        threads = torch.get_num_threads()
        capfd.readouterr()
        with within():
            try:
                code = COMMANDS[command](argv)
            except SystemExit as stop:
                code = stop.code
            except (Exception, HungError, TakenError) as error:
                frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
                places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
                own = [place for place in places if not place.startswith(("conftest", "refusal", "test_"))]
                pytest.fail(f"{type(error).__name__} in {own[-1:]}: {error!s:.200}", pytrace=False)
        torch.set_num_threads(threads)
        shown = capfd.readouterr()
        lines = [line for line in re.split(r"[\r\n]+", shown.err) if line.strip() and not _BAR.search(line)]
        _hold(code == 2, f"exit code {code}", lines)
        _hold(len(lines) == 1, f"{len(lines)} lines", lines)
        _hold(lines[0].isprintable(), f"control characters: {lines[0]!r:.200}", lines)
        _hold(len(lines[0]) < 8000, f"{len(lines[0])} characters", lines)
        mentioned = any(word in lines[0].lower() for word in case.mentions.lower().split("|"))
        _hold(mentioned, f"no {case.mentions!r}", lines)
        after = listing(here, world["TARGET"].parent)
        changes = {path for path, _ in set(after.items()) ^ set(before.items())}
        changes -= {path for path in changes if case.begins and path.startswith(str(here / case.begins))}
        _hold(not changes, f"on disk: {sorted(changes)}", lines)
        left = [path.name for path in cache.iterdir() if path.suffix in (".partial", ".work")]
        _hold(not left, f"left in the cache: {left}", lines)

    return check


def _hold(so: bool, otherwise: str, lines: list[str]) -> None:
    if not so:
        pytest.fail(f"{otherwise}: {' / '.join(lines)[:600]}", pytrace=False)
