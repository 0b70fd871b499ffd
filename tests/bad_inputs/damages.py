"""Damaged targets and heads: each takes a good folder's copy and spoils one thing in it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bad_inputs.refusal import Content, device, fifo, folder, loop
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]


class Evil:
    """A pickle that runs code when it is opened."""

    def __reduce__(self):
        return (open, ("hacked", "w"))


def replaced(name: str, content: Content) -> Damage:
    """A file is something else."""

    def damage(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if callable(content):
            content(path)
        elif content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def fields(name: str, **changes: Any) -> Damage:
    """A JSON file has other values; ... deletes a key."""

    def damage(root: Path) -> None:
        read = json.loads((root / name).read_text())
        read = {key: value for key, value in {**read, **changes}.items() if value is not ...}
        (root / name).write_text(json.dumps(read))

    return damage


def config(**changes: Any) -> Damage:
    return fields("config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    """The tensors are others."""

    def damage(root: Path) -> None:
        tensors = load_file(root / "model.safetensors")
        change(tensors)
        save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})

    return damage


def cut(name: str, keep: float) -> Damage:
    def damage(root: Path) -> None:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def pickled(value: Callable[[Path], Any]) -> Damage:
    """The weights are a pickle."""

    def damage(root: Path) -> None:
        made = value(root)
        (root / "model.safetensors").unlink()
        if isinstance(made, bytes):
            (root / "pytorch_model.bin").write_bytes(made)
        else:
            torch.save(made, root / "pytorch_model.bin")

    return damage


def index(content: Any) -> Damage:
    def damage(root: Path) -> None:
        (root / "model.safetensors").rename(root / "other.safetensors")
        (root / "model.safetensors.index.json").write_text(json.dumps(content))

    return damage


def first(tensors: dict[str, torch.Tensor]) -> str:
    return sorted(tensors)[0]


def each(tensors: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors.update({name: change(tensor).contiguous() for name, tensor in tensors.items()})


_CONFIGS: dict[str, Damage] = {
    f"config {kind}": replaced("config.json", content)
    for kind, content in {
        "missing": None,
        "a folder": folder,
        "a pipe": fifo,
        "a device": device,
        "a link to itself": loop,
        "empty": "",
        "a list": "[1]",
        "a text": '"x"',
        "null": "null",
        "deep": "[" * 100_000,
        "UTF-16": "{}".encode("utf-16"),
        "binary": bytes(range(256)),
        "no keys": "{}",
    }.items()
}
_WEIGHTS: dict[str, Damage] = {
    "weights missing": replaced("model.safetensors", None),
    "weights empty": replaced("model.safetensors", b""),
    "weights a folder": replaced("model.safetensors", folder),
    "weights a pipe": replaced("model.safetensors", fifo),
    "weights a device": replaced("model.safetensors", device),
    "weights a text": replaced("model.safetensors", "hello"),
    "weights of a huge header": replaced("model.safetensors", b"\xff" * 7 + b"\x7f" + b"{}"),
    "weights cut in the header": cut("model.safetensors", 0.01),
    "weights cut in the middle": cut("model.safetensors", 0.5),
    "weights cut at the end": cut("model.safetensors", 0.999),
    "weights: one missing": weights(lambda tensors: tensors.pop(first(tensors))),
    "weights: one of another shape": weights(lambda tensors: tensors.update({first(tensors): torch.zeros(3, 5)})),
    "weights: none at all": weights(lambda tensors: tensors.clear()),
    "weights: NaN": weights(lambda tensors: each(tensors, lambda tensor: tensor * torch.nan)),
    "weights: infinite": weights(lambda tensors: each(tensors, lambda tensor: tensor * torch.inf)),
    "weights: integers": weights(lambda tensors: each(tensors, lambda tensor: tensor.to(torch.int64))),
    "pickle of code": pickled(lambda root: pickle.dumps(Evil())),
    "pickle of a list": pickled(lambda root: [1, 2]),
    "pickle of a text": pickled(lambda root: b"hello"),
    "pickle empty": pickled(lambda root: b""),
    "index of a missing shard": index({"weight_map": {"a": "gone.safetensors"}}),
    "index a list": index([1]),
    "index of nothing": index({}),
    "index out of the folder": index({"weight_map": {"a": "../other.safetensors"}}),
    "index of numbers": index({"weight_map": {"a": 7}}),
}

TARGETS: dict[str, Damage] = {
    **_CONFIGS,
    **_WEIGHTS,
    "weights: all zero": weights(lambda tensors: each(tensors, torch.zeros_like)),
    "model_type unknown": config(model_type="nonsense"),
    "model_type a number": config(model_type=7),
    "model_type missing": config(model_type=...),
    "another family": config(model_type="bert"),
    "a recurrent family": config(model_type="mamba"),
    "code of its own": config(model_type="own", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "e.M"}),
    "hidden_size negative": config(hidden_size=-32),
    "hidden_size 0": config(hidden_size=0),
    "hidden_size a text": config(hidden_size="x"),
    "hidden_size another": config(hidden_size=64),
    "hidden_size null": config(hidden_size=None),
    "num_hidden_layers 1e9": config(num_hidden_layers=10**9),
    "num_hidden_layers negative": config(num_hidden_layers=-1),
    "num_hidden_layers 0": config(num_hidden_layers=0),
    "num_hidden_layers a float": config(num_hidden_layers=2.5),
    "num_attention_heads 0": config(num_attention_heads=0),
    "num_attention_heads 3": config(num_attention_heads=3),
    "num_key_value_heads 3": config(num_key_value_heads=3),
    "vocab_size 1e9": config(vocab_size=10**9),
    "vocab_size 1e12": config(vocab_size=10**12),
    "vocab_size negative": config(vocab_size=-1),
    "vocab_size too small": config(vocab_size=8),
    "vocab_size a list": config(vocab_size=[300]),
    "intermediate_size 1e12": config(intermediate_size=10**12),
    "max_position_embeddings 0": config(max_position_embeddings=0),
    "max_position_embeddings negative": config(max_position_embeddings=-5),
    "max_position_embeddings a text": config(max_position_embeddings="x"),
    "rms_norm_eps NaN": config(rms_norm_eps=float("nan")),
    "hidden_act unknown": config(hidden_act="nonsense"),
    "dtype unknown": config(dtype="float1"),
    "rope unknown": config(rope_parameters={"rope_type": "nonsense", "rope_theta": 1.0}),
    "layer_types unknown": config(layer_types=["nonsense", "nonsense"]),
    "eos_token_id a text": fields("generation_config.json", eos_token_id="x"),
    "generation config a list": replaced("generation_config.json", "[1]"),
    "tokenizer missing": replaced("tokenizer.json", None),
    "tokenizer empty": replaced("tokenizer.json", ""),
    "tokenizer a list": replaced("tokenizer.json", "[1]"),
    "tokenizer no keys": replaced("tokenizer.json", "{}"),
    "tokenizer null": replaced("tokenizer.json", "null"),
    "tokenizer a pipe": replaced("tokenizer.json", fifo),
    "tokenizer a device": replaced("tokenizer.json", device),
    "tokenizer a folder": replaced("tokenizer.json", folder),
    "tokenizer binary": replaced("tokenizer.json", bytes(range(256))),
    "tokenizer cut": cut("tokenizer.json", 0.5),
    "tokenizer without a model": fields("tokenizer.json", model=None),
    "tokenizer of an unknown model": fields("tokenizer.json", model={"type": "nonsense"}),
    "tokenizer config a list": replaced("tokenizer_config.json", "[1]"),
    "tokenizer config empty": replaced("tokenizer_config.json", ""),
    "tokenizer config binary": replaced("tokenizer_config.json", bytes(range(256))),
    "tokenizer class a number": fields("tokenizer_config.json", tokenizer_class=7),
    "eos token a number": fields("tokenizer_config.json", eos_token=7),
}

TEMPLATES: dict[str, Damage] = {
    f"template {name}": replaced("chat_template.jinja", text)
    for name, text in {
        "that raises": "{{ raise_exception('no') }}",
        "of bad syntax": "{% for m in messages %}",
        "of an unknown name": "{{ nonsense.of.nothing }}",
        "of a bad filter": "{{ messages | nonsense }}",
        "that divides by zero": "{{ 1 / 0 }}",
        "that adds texts to numbers": "{{ messages[0].content + 1 }}",
        "that recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "that loops": "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}",
        "that writes without end": "{{ 'x' * 9999999999 }}",
        "that reaches for code": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "that is empty": "{% if false %}x{% endif %}",
        "in UTF-16": "{{ messages }}".encode("utf-16"),
        "that is binary": bytes(range(128, 256)),
    }.items()
}

HEADS: dict[str, Damage] = {
    **_CONFIGS,
    **_WEIGHTS,
    "weights: one too many": weights(lambda tensors: tensors.update({"surplus": torch.zeros(3)})),
    "weights: mixed dtypes": weights(lambda tensors: tensors.update({first(tensors): tensors[first(tensors)].half()})),
    "architectures unknown": config(architectures=["Nonsense"]),
    "architectures a text": config(architectures="Nonsense"),
    "architectures a number": config(architectures=7),
    "architectures empty": config(architectures=[]),
    "architectures of lists": config(architectures=[["MLPSpeculator"]]),
    "architectures of a target": config(architectures=["LlamaForCausalLM"]),
    "n_predict missing": config(n_predict=...),
    "n_predict 0": config(n_predict=0),
    "n_predict negative": config(n_predict=-1),
    "n_predict a text": config(n_predict="3"),
    "n_predict a float": config(n_predict=3.0),
    "n_predict true": config(n_predict=True),
    "n_predict 1e8": config(n_predict=10**8),
    "n_predict 1e30": config(n_predict=10**30),
    "vocab_size 1e9": config(vocab_size=10**9),
    "vocab_size 1e30": config(vocab_size=10**30),
    "vocab_size another": config(vocab_size=301),
    "vocab_size null": config(vocab_size=None),
    "emb_dim another": config(emb_dim=33),
    "emb_dim 1e12": config(emb_dim=10**12),
    "inner_dim 1e9": config(inner_dim=10**9),
    "inner_dim negative": config(inner_dim=-1),
    "tie_weights a text": config(tie_weights="yes"),
    "tie_weights false": config(tie_weights=False),
    "scale_input a number": config(scale_input=1),
    "draft_vocab_size too large": config(draft_vocab_size=10**6),
    "draft_vocab_size without tokens": config(draft_vocab_size=10),
    "base model a number": config(base_model_name_or_path=7),
    "trained_length a text": config(trained_length="x"),
    "training_data a text": config(training_data="x"),
    "top_k_tokens_per_head too short": config(top_k_tokens_per_head=[1]),
}
TUNED: dict[str, Damage] = {
    f"decoding.json {name}": replaced("decoding.json", content)
    for name, content in {
        "empty": "",
        "a list": "[1]",
        "no keys": "{}",
        "UTF-16": "{}".encode("utf-16"),
        "deep": "[" * 100_000,
        "settings a text": '{"settings": "x"}',
        "settings of texts": '{"settings": ["x"]}',
        "no temperature": '{"settings": [{"num_speculative_tokens": 2}]}',
        "temperature a text": '{"settings": [{"temperature": "x", "num_speculative_tokens": 2}]}',
        "neither length nor tree": '{"settings": [{"temperature": 0}]}',
        "length 0": '{"settings": [{"temperature": 0, "num_speculative_tokens": 0}]}',
        "length negative": '{"settings": [{"temperature": 0, "num_speculative_tokens": -1}]}',
        "length a text": '{"settings": [{"temperature": 0, "num_speculative_tokens": "x"}]}',
        "length a float": '{"settings": [{"temperature": 0, "num_speculative_tokens": 1.5}]}',
        "length too large": '{"settings": [{"temperature": 0, "num_speculative_tokens": 99}]}',
        "length huge": '{"settings": [{"temperature": 0, "num_speculative_tokens": 1000000000000}]}',
        "tree empty": '{"settings": [{"temperature": 0, "tree": []}]}',
        "tree a number": '{"settings": [{"temperature": 0, "tree": 7}]}',
        "tree of texts": '{"settings": [{"temperature": 0, "tree": ["x"]}]}',
        "tree of negative ranks": '{"settings": [{"temperature": 0, "tree": [[-1]]}]}',
        "tree of a huge rank": '{"settings": [{"temperature": 0, "tree": [[1000000]]}]}',
    }.items()
}
