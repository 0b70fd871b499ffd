"""A target without its layers: the embedding, the final norm and the output matrix, read by name from the checkpoint.

A hub's checkpoint is downloaded shard by shard, and only the shards that hold one of these tensors.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from speculator.errors import UserError, refuse
from speculator.files import read_weight_map
from speculator.target.gguf.file import is_gguf
from speculator.target.loading import OTHER_PARTS, causal, check_folder, warn_if_untied

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_LAYER = re.compile(r"\.\d+\.")


def read_outside_layers(
    name: str, revision: str | None, dtype: str, device: torch.device, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, Any, nn.Module]:
    """Load a hub id or folder without its layers; return the tokenizer, the model and its final norm.

    The model's config is that of the whole model. A quantised checkpoint works if these tensors are not quantised.

    Args:
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".

    Raises:
        UserError: the files are damaged, or the model has other weights around its layers.
    """
    refuse((is_gguf(name), f"{name}: a target on servers needs a checkpoint in safetensors here, not a GGUF file"))
    try:
        if name.startswith((".", "/")) or Path(name).exists():
            check_folder(Path(name))
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        whole = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        causal(whole, name)
        config = whole.get_text_config()
        stored = config.dtype or whole.dtype or torch.float32
        kind = stored if dtype == "auto" else getattr(torch, dtype)
        # The family's own class with no layers, and without memory: it says what surrounds them, and by what names.
        with torch.device("meta"):
            cut = _without_layers(config)
            model = AutoModelForCausalLM.from_config(cut, dtype=kind, trust_remote_code=trust_remote_code)
        body = model.get_decoder()
        norm = next((module for name, module in body.named_children() if name in _NORMS), None)
        # Whatever else such a model holds would take part in its logits, and is not known here.
        parts = (model.get_input_embeddings(), norm, model.get_output_embeddings())
        known = {id(weight) for part in parts if part is not None for weight in part.parameters()}
        if None in parts or any(id(weight) not in known for weight in model.parameters()):
            raise UserError(
                f"{type(model).__name__} has more around its layers than an embedding, a final norm and an output "
                "matrix: train it without target.server"
            )
        tensors = _read(name, revision, list(model.state_dict()), device, kind)
        # Tied models store one matrix: the other is still on the meta device until it is tied.
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights(missing_keys={*model.state_dict()} - {*tensors}, recompute_mapping=False)
        warn_if_untied(model, name)
        if missing := [weight for weight, value in model.named_parameters() if value.is_meta]:
            raise UserError(f"its files lack {missing[0]}")
        model.config = config
        config.name_or_path = name
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
        except OSError:  # none in the folder: the config's own
            model.generation_config = GenerationConfig.from_model_config(config)
    except Exception as error:  # a damaged folder fails anywhere in the libraries that read it
        raise UserError(f"can't load the target {name!r}: {shorten(str(error), 300) or type(error).__name__}") from None
    assert norm is not None
    return tokenizer, model.eval().requires_grad_(False), norm


def _without_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the config with no layers, and with empty lists of what each layer is."""
    cut, count = copy.deepcopy(config), config.num_hidden_layers
    cut.num_hidden_layers = 0
    for key, value in vars(config).items():
        # One entry per layer, such as `layer_types`: transformers checks that there are as many as layers.
        if isinstance(value, list | tuple) and len(value) == count:
            setattr(cut, key, [])
    return cut


def _read(
    name: str, revision: str | None, wanted: list[str], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the wanted tensors by name, on the device; `wanted` are names in the text model, missing ones left out."""

    def file(part: str, required: bool = True) -> str | None:
        return cached_file(name, part, revision=revision, _raise_exceptions_for_missing_entries=required)

    index = file(_INDEX, required=False)
    if index is not None:
        shard_of = read_weight_map(Path(index))
    else:
        with safe_open(str(file(_FILE)), "pt") as only:
            shard_of = dict.fromkeys(only.keys(), _FILE)
    tensors = {}
    for weight in wanted:
        key = _stored_name(weight, list(shard_of))
        if key is None:
            continue
        # Opened by name: of a checkpoint of a terabyte, the shards of two or three tensors are downloaded.
        with safe_open(str(file(shard_of[key])), "pt", device=str(device)) as shard:
            tensor = shard.get_tensor(key)
        if tensor.itemsize < 2 or not tensor.is_floating_point():
            raise UserError(f"{key} is stored quantised: name the unquantised checkpoint; the server may run this one")
        tensors[weight] = tensor.to(dtype).clone()  # not memory-mapped
    return tensors


def _stored_name(weight: str, names: list[str]) -> str | None:
    """Return the checkpoint's name, maybe with a multimodal prefix, of a text model's tensor; None unless one fits."""
    if weight in names:
        return weight
    # "model.norm.weight" is looked for as ".norm.weight": multimodal models have "model.language_model.norm.weight".
    tail = "." + weight.partition(".")[2] if not weight.startswith("lm_head.") else "." + weight
    found = [
        name
        for name in names
        if f".{name}".endswith(tail) and not _LAYER.search(name) and not re.search("|".join(OTHER_PARTS), name)
    ]
    return found[0] if len(found) == 1 else None
