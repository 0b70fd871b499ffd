"""Load a target's tokenizer, model and adapter; any error in their files becomes a UserError of one line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_accelerate_available

from speculator.errors import UserError, refuse
from speculator.target.gguf.file import complete, is_gguf, load_model, read_config, read_tokenizer
from speculator.target.sharding import Group, check_heads
from speculator.terminal import log

CONFIG, ADAPTER = "config.json", "adapter_config.json"
# Parts of a checkpoint that text does not pass through: MTP layers and the towers of multimodal models.
OTHER_PARTS = "mtp", "vision", "visual", "image", "video", "audio", "speech", "multi_modal"


def read_target(
    name: str,
    revision: str | None,
    dtype: str,
    placement: torch.device | Literal["auto"] | Group,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load the tokenizer and the model of a hub id, folder or GGUF file.

    Args:
        dtype: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
        placement: a device; "auto" for all devices of this process; or the processes that share the model.

    Raises:
        UserError: files are missing, damaged or not those of a supported model.
    """
    with _explained(name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns before errors that are reported here
            tokenizer = read_tokenizer(name, trust_remote_code, revision)
            config = read_config(name, trust_remote_code, revision)
            options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "dtype": dtype}
            if isinstance(placement, Group):
                causal(config, name)
                if placement.parallel == "tp":
                    check_heads(name, config.get_text_config(), placement.size)
                options["distributed_config"] = placement.config()
            elif placement == "auto":
                options["device_map"] = placement
            elif placement.type != "cpu" and (
                getattr(config, "quantization_config", None) or (is_accelerate_available() and not is_gguf(name))
            ):
                # Weight by weight: no whole copy in host memory, and some quantised ones can't be moved after loading.
                options["device_map"] = {"": placement}
            kind = auto_class(config)
            model, found = load_model(
                kind, name, revision, **options, output_loading_info=True, ignore_mismatched_sizes=True
            )
        if isinstance(placement, torch.device) and "device_map" not in options:
            model = model.to(placement)
        if is_gguf(name):
            complete(model, name)
        _check_weights(model, **{kind: found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")})
        size = model.config.get_text_config().vocab_size
        if tokenizer.vocab_size > size:
            raise UserError(f"its tokenizer has {tokenizer.vocab_size} tokens, and the model only {size}")
    return tokenizer, model


def load_config(name: str, trust_remote_code: bool = False, revision: str | None = None) -> PreTrainedConfig:
    """Read the config of a hub id, folder or GGUF file; raise a UserError that names the target if that fails."""
    with _explained(name):
        config = read_config(name, trust_remote_code, revision)
        text_config(config)
        return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=config.is_encoder_decoder or None)


def decoder_config(model: Any) -> PreTrainedConfig:
    """Return the decoder's config: in a config for both, a field such as the number of layers may be the encoder's."""
    pair = model.config.is_encoder_decoder
    return (model.get_decoder() if pair else model).config.get_text_config(decoder=pair or None)


def causal(config: PreTrainedConfig, name: str) -> PreTrainedConfig:
    """Return the config of a model that a head may be trained for; raise a UserError for an encoder-decoder model."""
    decoded = (
        "n-gram lookup and draft models draft for it, in generate, serve, and data generate and eval without servers"
    )
    pair = f"{name} is an encoder-decoder model, for which no head is trained: {decoded}"
    refuse((config.is_encoder_decoder, pair))
    return config


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn every error inside the block into a UserError that names the target; a local folder is checked first."""
    refuse((not name or "\0" in name, f"{name!r} is neither a hub id nor a folder"))
    try:
        if not is_gguf(name) and (name.startswith((".", "/")) or Path(name).exists()):
            check_folder(Path(name))
        yield
    except Exception as error:  # a damaged folder fails anywhere in the libraries that read it
        reason = shorten(str(error), 300) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = (
                "it comes with Python code, which runs only if you trust it: --trust_remote_code; train.py: "
                "--target.trust_remote_code true"
            )
        raise UserError(f"can't load the target {name!r}: {reason}") from None


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' Auto class for a config; T5Gemma 2 and encoder-decoders not of text raise a UserError."""
    if config.is_encoder_decoder:  # first: BART's kind has a class for causal LMs too, whose cross attention is random
        text = type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        merged = config.model_type == "t5gemma2"
        refuse(
            (not text, "an encoder-decoder model must read text and write text"),
            (merged, "T5Gemma 2 merges cross attention with self attention, which decoding does not support"),
        )
        return AutoModelForSeq2SeqLM
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForCausalLM if causal else AutoModelForMultimodalLM


def warn_if_untied(model: Any, name: str) -> None:
    """Print a warning if the config ties a model's output matrix to its embedding, and the files hold two matrices.

    transformers follows the files, and so do we; vLLM follows the config.
    """
    keys = getattr(model, "_tied_weights_keys", None)
    ties = getattr(model.config, "tie_word_embeddings", False) and keys and not is_gguf(name)
    output = getattr(model.get_output_embeddings(), "weight", None)
    if ties and output is not None and not output.is_meta and output is not model.get_input_embeddings().weight:
        log(
            f"warning: {name}: its config ties the output matrix to the embedding, but its files hold two matrices, "
            "both used here; vLLM uses the embedding alone, unless config.json has tie_word_embeddings false"
        )


def drop_vision_tower(model: Any) -> None:
    """Delete the parts of a multimodal model's vision tower to free memory: text does not pass through it."""
    tower = model.get_encoder("image")
    if tower is not model:
        for name, _ in list(tower.named_children()):
            delattr(tower, name)


def add_adapter(model: Any, adapter: str) -> None:
    """Load a PEFT adapter (hub id or folder) into a model, without merging it; raise a UserError if it does not fit."""
    local = adapter.startswith((".", "/")) or Path(adapter).exists()
    refuse(
        (local and not (Path(adapter) / ADAPTER).is_file(), f"no {ADAPTER} in {adapter}, so not an adapter's folder")
    )
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise UserError(f"{adapter}: adapters need the package peft: pip install peft") from None
    try:
        config = PeftConfig.from_pretrained(adapter, inference_mode=True)
        refuse(
            (config.is_prompt_learning, f"{config.peft_type.value} adds virtual tokens, which are not supported"),
            (getattr(config, "alora_invocation_tokens", None), "activated LoRA changes a part of a text only"),
        )
        # PEFT's own loader, which knows all forms of its files, changes the layers of the model in place.
        added = PeftModel(model, config, autocast_adapter_dtype=False)
        found = added.load_adapter(adapter, "default", autocast_adapter_dtype=False)
        for keys, fault in ((found.missing_keys, "its files lack"), (found.unexpected_keys, "the model lacks")):
            if keys:
                raise UserError(f"{fault} {sorted(keys)[0]}")
    except Exception as error:
        reason = shorten(str(error), 300) or type(error).__name__
        if shapes := re.search(r"size mismatch for (\S+): .*?(\[.*?\]).*?(\[.*?\])", str(error)):
            reason = (
                f"{shapes[1]} has shape {shapes[2]} in its files, but {shapes[3]} in the model; if it was trained on a "
                "model with added tokens, merge it into that model"
            )
        raise UserError(f"can't add the adapter {adapter!r} to {model.config.name_or_path}: {reason}") from None


def check_folder(folder: Path) -> None:
    """Raise a UserError for a folder without config.json, or an adapter's, which transformers would add by itself."""
    missing = f"no {CONFIG} in {folder}, so not the folder of a model"
    is_adapter, is_model = (folder / ADAPTER).is_file(), (folder / CONFIG).is_file()
    advice = f"its {ADAPTER} makes it an adapter: give its base model as the target, and this as the adapter"
    refuse(
        (is_adapter, f"{f'{folder} holds a {CONFIG}, but' if is_model else f'{missing};'} {advice}"),
        (not is_model, missing),
    )


def _check_weights(model: Any, missing_keys: Any, unexpected_keys: Any, mismatched_keys: Any) -> None:
    """Raise a UserError unless files hold exactly the model's weights, in its shapes, and maybe `OTHER_PARTS`."""
    text = model.config.get_text_config()
    mtp_layers = range(getattr(text, "num_nextn_predict_layers", 0) or 0)
    other_parts = [*OTHER_PARTS, *(rf"\blayers\.{text.num_hidden_layers + i}\." for i in mtp_layers)]
    unread = [key for key in unexpected_keys if not re.search("|".join(other_parts), key)]
    scheme = getattr(model.config, "quantization_config", None) or getattr(text, "quantization_config", None)
    # A method that transformers knows has turned the dict into an object.
    if isinstance(scheme, dict) and (ignored := unread or [name for name, *_ in mismatched_keys]):
        raise UserError(
            f"transformers can't load weights quantised with quant_method {scheme['quant_method']!r}: the model does "
            f"not read {_listed(ignored)}; use the unquantised checkpoint"
        )
    for name, stored, shape in sorted(mismatched_keys):
        raise UserError(f"{name} has shape {list(stored)} in its files, but {list(shape)} by its {CONFIG}")
    if missing_keys:
        raise UserError(f"its files lack {_listed(missing_keys)}")
    if unread:
        raise UserError(
            f"its files hold {_listed(unread)}, which the model of its {CONFIG} does not read: does {CONFIG} lack an "
            "entry, such as quantization_config?"
        )


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
