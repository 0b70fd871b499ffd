"""Targets in GGUF files, which transformers' own loader reads: weights, tokenizer, chat template and settings."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedConfig, modeling_gguf_pytorch_utils

from speculator.errors import UserError, first_line, refuse
from speculator.files import check_input

# transformers shows one line per tensor in log files; `disable=None` keeps its progress bar to terminals.
modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=None)  # type: ignore[attr-defined]

_MAGIC = b"GGUF"
_EOS, _EOT, _TOKENS = (f"tokenizer.ggml.{name}" for name in ("eos_token_id", "eot_token_id", "tokens"))


def is_gguf(name: str) -> bool:
    """Return whether a target's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def located(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the location of a hub id, folder or GGUF file as arguments of transformers' `from_pretrained`."""
    refuse((revision is not None and Path(name).exists(), f"revision {revision}: {name} is on this disk, so has none"))
    if not is_gguf(name):
        return {"pretrained_model_name_or_path": name, "revision": revision}
    metadata(name)
    return {"pretrained_model_name_or_path": str(Path(name).parent), "gguf_file": Path(name).name}


def read_config(
    name: str, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> PreTrainedConfig:
    """Return the config of a hub id, folder or GGUF file; no weights are read."""
    config = AutoConfig.from_pretrained(**located(name, revision), **options, trust_remote_code=trust_remote_code)
    if is_gguf(name):
        config.get_text_config().max_position_embeddings = metadata(name)["context_length"]
    return config


@lru_cache(maxsize=4)
def metadata(name: str) -> dict[str, Any]:
    """Return a dict with "context_length" and "eos_token_ids" of a GGUF file."""
    file = check_input(name)
    with file.open("rb") as stream:
        refuse((stream.read(len(_MAGIC)) != _MAGIC, f"{name} is not a GGUF file"))
    try:
        import accelerate  # noqa: F401  transformers needs it to load GGUF files
        from gguf import GGUFReader
    except ImportError as error:
        package = "accelerate" if "accelerate" in str(error) else "gguf"
        raise UserError(f"{name}: GGUF files need the package {package}: pip install {package}") from None
    try:
        fields = GGUFReader(file).fields
        length = f"{fields['general.architecture'].contents()}.context_length"
        values = {key: fields[key].contents() for key in (length, _EOS, _EOT) if key in fields}
    except Exception as error:  # the package raises anything for a damaged file
        raise UserError(f"{name} is damaged or cut short: {first_line(error)}") from None
    missing = [key for key in (length, _EOS, _TOKENS) if key not in fields]
    refuse((missing, f"{name}: its metadata lack {', '.join(missing)}"))
    return {"context_length": values.pop(length), "eos_token_ids": sorted(set(values.values()))}


def complete(model: Any, name: str) -> None:
    """Set name, context length and EOS tokens of a model from a GGUF file, which transformers' loader leaves out.

    Also removes its quantisation config, because the loader has dequantised the weights.
    """
    known = metadata(name)
    model.config.name_or_path = name
    model.config.get_text_config().max_position_embeddings = known["context_length"]
    model.generation_config.eos_token_id = known["eos_token_ids"]
    model.hf_quantizer.remove_quantization_config(model)  # the weights are dequantised
