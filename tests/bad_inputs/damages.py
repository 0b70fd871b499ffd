"""Damaged targets, heads and checkpoints: each function changes one thing in a copy of a good folder."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import tiny_tokenizer
from safetensors.torch import load_file, save_file

from speculator.files import MANIFEST

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


def changed(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Change a file's bytes."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def cut(name: str) -> Damage:
    """Drop the second half of a file."""
    return changed(name, lambda raw: raw[: len(raw) // 2])


def flipped(name: str, at: float = 0.5) -> Damage:
    """Flip a bit of the byte at this part of a file: 0 is the first byte, 1 the last."""

    def change(raw: bytes) -> bytes:
        place = int(at * (len(raw) - 1))
        return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]

    return changed(name, change)


class Touch:
    """A pickle that makes a folder when it is opened."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickled(folder: Path) -> None:
    """Store the weights as a pickle with code in it."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Touch(), "x": "0" * 10**6}))


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


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
    "fewer layers than stored": config(num_hidden_layers=1),
    "a shard missing": without_a_shard,
    "a pickle with code": pickled,
    "tokenizer of another vocabulary": lambda folder: tiny_tokenizer(400).save_pretrained(folder),
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
    "n_predict of a hundred million": config(n_predict=10**8),
    "a pickle with code": pickled,
    "another emb_dim": config(emb_dim=33),
    "too large draft_vocab_size": config(draft_vocab_size=10**6),
}
CHECKPOINTS: dict[str, Damage] = {
    "no manifest": replaced(MANIFEST, None),
    "half a manifest": cut(MANIFEST),
    "a manifest of bytes": replaced(MANIFEST, bytes(range(128, 256))),
    "an empty manifest": replaced(MANIFEST, "{}"),
    "a list for a manifest": replaced(MANIFEST, '["model.safetensors"]'),
    "empty weights": replaced("model.safetensors", ""),
    "a flipped bit": flipped("model.safetensors"),
    "a missing file": replaced("trainer_state.json", None),
    "a folder for a file": as_folder,
}
KEYWORDS = {
    "fewer layers than stored": "layers",
    "a shard missing": "00002",
    "tokenizer of another vocabulary": "400",
    "n_predict of a hundred million": "n_predict",
}
"""Words that the error must contain, next to the folder's name."""
TUNED: dict[str, Damage] = {
    "empty": replaced("decoding.json", ""),
    "length too large": replaced("decoding.json", '{"settings": [{"temperature": 0, "num_speculative_tokens": 99}]}'),
}
