"""Damaged targets and heads: each function changes one thing in a copy of a good folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]


def replaced(name: str, content: str | bytes | None) -> Damage:
    """Give a file another content, or delete it."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def fields(name: str, **changes: Any) -> Damage:
    """Change values of a JSON file; ... deletes a key."""

    def damage(folder: Path) -> None:
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return damage


def config(**changes: Any) -> Damage:
    return fields("config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """Change the tensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(name: str) -> Damage:
    """Drop the second half of a file."""

    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def damaged_copy(good: Path, damage: Damage, workdir: Path) -> None:
    """Copy a good folder to `damaged` and change one thing in it."""
    damage(Path(shutil.copytree(good, workdir / "damaged")))


BOTH: dict[str, Damage] = {
    "no config": replaced("config.json", None),
    "no weights": replaced("model.safetensors", None),
    "cut weights": cut("model.safetensors"),
    "tensor of another shape": weights(lambda tensors: tensors.update({min(tensors): torch.zeros(3, 5)})),
    "NaN weights": weights(lambda tensors: tensors.update({name: t * torch.nan for name, t in tensors.items()})),
}
TARGETS: dict[str, Damage] = {
    **BOTH,
    "model that is not causal": config(model_type="bert"),
    "code of its own": config(model_type="own", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "e.M"}),
    "another hidden_size": config(hidden_size=64),
    "no tokenizer": replaced("tokenizer.json", None),
    "cut tokenizer": cut("tokenizer.json"),
}
TEMPLATES: dict[str, Damage] = {
    "raises": replaced("chat_template.jinja", "{{ raise_exception('no') }}"),
    "bad syntax": replaced("chat_template.jinja", "{% for m in messages %}"),
    "reaches for code": replaced("chat_template.jinja", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
}
HEADS: dict[str, Damage] = {
    **BOTH,
    "architecture of a target": config(architectures=["LlamaForCausalLM"]),
    "n_predict 0": config(n_predict=0),
    "another emb_dim": config(emb_dim=33),
    "too large draft_vocab_size": config(draft_vocab_size=10**6),
}
TUNED: dict[str, Damage] = {
    "empty": replaced("decoding.json", ""),
    "length too large": replaced("decoding.json", '{"settings": [{"temperature": 0, "num_speculative_tokens": 99}]}'),
}
