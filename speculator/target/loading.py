"""Reading a target's tokenizer and model, with what is wrong with their files said in a line."""

from __future__ import annotations

import re
import warnings
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN

from speculator.errors import UserError, refuse
from speculator.target.gguf import complete, is_gguf, located
from speculator.target.sharding import Group, check_heads

CONFIG, ADAPTER = "config.json", "adapter_config.json"


def read_target(
    name: str,
    revision: str | None,
    dtype: str,
    place: torch.device | Literal["auto"] | Group,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedTokenizerBase, Any]:
    """Tokenizer and model of a hub id or folder. Code that comes with a model is not run unless it is trusted.

    Args:
        place: a device; "auto": all that are here; or the processes among which it is sharded.

    Raises:
        UserError: whatever is wrong with them.
    """
    refuse((not name or "\0" in name, f"{name!r} is neither a hub id nor a folder"))
    own: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        folder = Path(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, on the way to an error that says it in a line
            where = located(name, revision)
            if not is_gguf(name) and (name.startswith((".", "/")) or folder.exists()):
                _check_folder(folder)
            tokenizer = AutoTokenizer.from_pretrained(**where, **own)
            config = AutoConfig.from_pretrained(**where, **own)
            if isinstance(place, Group):
                if place.parallel == "tp":
                    check_heads(name, config.get_text_config(), place.size)
                where["distributed_config"] = place.config()
            elif place == "auto":
                where["device_map"] = place
            elif place.type != "cpu" and getattr(config, "quantization_config", None):
                where["device_map"] = {"": place}  # some lay out their weights where they are to run, and stay there
            check_activation(config.get_text_config())
            options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(**where, **own, **options)
        model, found = loaded
        for key, stored_shape, shape in sorted(found["mismatched_keys"]):
            raise UserError(f"{key} has shape {list(stored_shape)} in its files, and {list(shape)} by its {CONFIG}")
        if isinstance(place, torch.device) and "device_map" not in where:
            model = model.to(place)
        if is_gguf(name):
            complete(model, name)
        if missing := sorted(found["missing_keys"]):
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise UserError(f"its files hold no {missing[0]}{others}")
        layers = model.config.get_text_config().num_hidden_layers
        stored = re.compile(rf"{model.base_model_prefix}\.(?:layers|h)\.(\d+)\.")
        if any((layer := stored.match(key)) and int(layer[1]) >= layers for key in found["unexpected_keys"]):
            raise UserError(f"its files hold more layers than the {layers} of its {CONFIG}")
        size = model.config.get_text_config().vocab_size
        if tokenizer.vocab_size > size:
            raise UserError(f"its tokenizer has {tokenizer.vocab_size} tokens, the model only {size}")
    except Exception as error:  # a damaged folder fails anywhere in the libraries that read it
        reason = shorten(str(error), 300) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = (
                "it needs Python code of its own, which is not run unless you trust it: --trust_remote_code; train.py: "
                "--target.trust_remote_code true"
            )
        raise UserError(f"can't load the target {name!r}: {reason}") from None
    return tokenizer, model


def add_adapter(model: Any, adapter: str) -> None:
    """Put a PEFT adapter's weights beside a model's own, as transformers does; they are not merged into them.

    Raises:
        UserError: no such adapter, or it does not fit; or the package that reads it is missing.
    """
    local = adapter.startswith((".", "/")) or Path(adapter).exists()
    refuse((local and not (Path(adapter) / ADAPTER).is_file(), f"no {ADAPTER} in {adapter}, so no adapter's folder"))
    try:
        import peft  # noqa: F401  transformers loads adapters by it
    except ImportError:
        raise UserError(f"{adapter}: adapters need the package peft: pip install peft") from None
    try:
        found = model.load_adapter(adapter)
        for keys, fault in ((found.missing_keys, "its files hold no"), (found.unexpected_keys, "the model has no")):
            if keys:
                raise UserError(f"{fault} {sorted(keys)[0]}")
    except Exception as error:  # it was made by others, for another model perhaps
        reason = shorten(str(error), 300) or type(error).__name__
        raise UserError(f"can't add the adapter {adapter!r} to {model.config.name_or_path}: {reason}") from None


def check_activation(config: PreTrainedConfig) -> None:
    """Raise a UserError for an activation function that transformers does not have."""
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            (nearest,) = get_close_matches(name, list(ACT2FN), n=1, cutoff=0)
            raise UserError(f"{key} {name!r} of its {CONFIG} is not an activation function; the nearest is {nearest!r}")


def _check_folder(folder: Path) -> None:
    missing = f"no {CONFIG} in {folder}, so not the folder of a model"
    if (folder / ADAPTER).is_file():
        missing += f"; its {ADAPTER} makes it an adapter: give its base model as the target, and this as the adapter"
    refuse((not (folder / CONFIG).is_file(), missing))
