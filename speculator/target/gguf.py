"""Targets in GGUF files: weights, tokenizer, chat template and settings in one, read by transformers' own loader."""

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
    """Whether a target's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def located(name: str, revision: str | None = None) -> dict[str, Any]:
    """Where a hub id, a folder or a GGUF file lies, as the arguments of transformers' `from_pretrained`.

    Raises:
        UserError: of a GGUF file, as `metadata`; a revision of what is on this disk.
    """
    refuse((revision is not None and Path(name).exists(), f"revision {revision}: {name} is on this disk, so has none"))
    if not is_gguf(name):
        return {"pretrained_model_name_or_path": name, "revision": revision}
    metadata(name)
    return {"pretrained_model_name_or_path": str(Path(name).parent), "gguf_file": Path(name).name}


def read_config(
    name: str, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> PreTrainedConfig:
    """The config of a hub id, a folder or a GGUF file, the weights left unread.

    Raises:
        UserError: as `located`.
        OSError, ValueError: as transformers.
    """
    config = AutoConfig.from_pretrained(**located(name, revision), **options, trust_remote_code=trust_remote_code)
    if is_gguf(name):
        config.get_text_config().max_position_embeddings = metadata(name)["context_length"]
    return config


@lru_cache(maxsize=4)
def metadata(name: str) -> dict[str, Any]:
    """A GGUF file's "context_length" and "eos_token_ids".

    Raises:
        UserError: the file is not there, is no GGUF, is damaged or says too little; or a package that reads it is
            missing.
    """
    file = check_input(name)
    with file.open("rb") as stream:
        refuse((stream.read(len(_MAGIC)) != _MAGIC, f"{name} is no GGUF file"))
    try:
        import accelerate  # noqa: F401  transformers loads GGUF files by it
        from gguf import GGUFReader
    except ImportError as error:
        package = "accelerate" if "accelerate" in str(error) else "gguf"
        raise UserError(f"{name}: GGUF files need the package {package}: pip install {package}") from None
    try:
        fields = GGUFReader(file).fields
        length = f"{fields['general.architecture'].contents()}.context_length"
        known = {key: fields[key].contents() for key in (length, _EOS, _EOT) if key in fields}
    except Exception as error:  # whatever the package stumbles over in a file that someone else wrote
        raise UserError(f"{name} is damaged or cut short: {first_line(error)}") from None
    missing = [key for key in (length, _EOS, _TOKENS) if key not in fields]
    refuse((missing, f"{name}: its metadata have no {', '.join(missing)}"))
    return {"context_length": known.pop(length), "eos_token_ids": sorted(set(known.values()))}


def complete(model: Any, name: str) -> None:
    """Give a model out of a GGUF file what the loader leaves out, and take what would tell it from any other model."""
    known = metadata(name)
    model.config.name_or_path = name
    model.config.get_text_config().max_position_embeddings = known["context_length"]
    model.generation_config.eos_token_id = known["eos_token_ids"]
    model.hf_quantizer.remove_quantization_config(model)  # the weights are dequantised
