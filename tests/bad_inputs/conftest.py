"""Good inputs that the cases vary, and the check that every error goes through."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import torch
from bad_inputs.cases import Case, write
from conftest import exit_code, tiny_tokenizer
from reports import report, report_row
from transformers import LlamaConfig, LlamaForCausalLM

import data.__main__
import eval.__main__
import speculator.__main__
import train.command_line
import train.run
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.report import write_record

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_NO_ERROR = re.compile(r"\d\S*/s\]|\?\S*/s\]|it/s\]|^\d/\d |: [\d,]+ rows read, ")
"""Progress bars, and counts of rows."""


def _train(argv: list[str]) -> int:
    return train.run.main(train.command_line.parse(argv))


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "data": data.__main__.main,
    "eval": eval.__main__.main,
    "speculator": speculator.__main__.main,
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory, text_file) -> dict[str, Path]:
    """Good inputs by the words that stand for them in a case's command."""
    root = tmp_path_factory.mktemp("good")
    paths = {name: root / name.lower() for name in ("TARGET", "NO_TEMPLATE", "MLP")}
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=0)).save_pretrained(paths["TARGET"])
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(paths["TARGET"])
    shutil.copytree(paths["TARGET"], paths["NO_TEMPLATE"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(paths["TARGET"])
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16, n_predict=3)).save_pretrained(
        paths["MLP"]
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
    paths["PLAIN"] = ROOT / "tests" / "plain.yaml"
    paths["REPORT"] = root / "report.json"
    write_record(paths["REPORT"], report(report_row()))
    return paths


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workdir(tmp_path, cache, monkeypatch) -> Path:
    """An empty current folder, on a machine without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECULATOR_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(cache / "no_token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return tmp_path


@pytest.fixture
def fails_in_one_line(workdir, inputs, cache, capfd) -> Callable[[Case], None]:
    """Run a case; check its exit code, its one line on stderr, and that it wrote nothing."""

    def listing() -> dict[str, int]:
        folders = (workdir, inputs["TARGET"].parent)
        paths = [path for folder in folders for path in folder.rglob("*")]
        return {str(path): path.lstat().st_mtime_ns if path.is_file() else 0 for path in paths}

    def check(case: Case) -> None:
        write(workdir, case.files)
        before, threads = listing(), torch.get_num_threads()
        named = re.compile(rf"\b({'|'.join(inputs)})\b")
        command, *argv = shlex.split(named.sub(lambda match: str(inputs[match[0]]), case.command))
        capfd.readouterr()
        code = exit_code(COMMANDS[command], argv)
        torch.set_num_threads(threads)
        error = capfd.readouterr().err
        lines = [line for line in re.split(r"[\r\n]+", error) if line.strip() and not _NO_ERROR.search(line)]
        assert code == 2, error
        assert len(lines) == 1, error
        assert lines[0].isprintable()
        assert all(word in lines[0].lower() for word in case.keyword.lower().split()), lines[0]
        assert listing() == before
        assert not [path for path in cache.iterdir() if path.suffix in (".partial", ".work")]

    return check
