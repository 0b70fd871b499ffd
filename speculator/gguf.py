"""Targets in GGUF files: one file with weights, tokenizer, chat template and settings, read by transformers' loader."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from speculator.errors import UserError, first_line, refuse
from speculator.files import check_input

_MAGIC = b"GGUF"


def is_gguf(name: str) -> bool:
    """Whether a target's name is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def located(name: str) -> dict[str, Any]:
    """Where a hub id, a folder or a GGUF file lies, as the arguments of transformers' `from_pretrained`.

    Raises:
        UserError: a GGUF file that is not there, or is none, or can't be read; see `metadata`.
    """
    if not is_gguf(name):
        return {"pretrained_model_name_or_path": name}
    metadata(name)
    return {"pretrained_model_name_or_path": str(Path(name).parent), "gguf_file": Path(name).name}


@lru_cache(maxsize=4)
def metadata(name: str) -> dict[str, Any]:
    """A GGUF file's `context_length` and `eos_token_ids`.

    Raises:
        UserError: no such file; no GGUF; cut short or damaged; one of them is missing; the package `gguf` is.
    """
    file = Path(name)
    refuse((not file.is_file(), f"{name}: no such file"))
    check_input(file)
    with file.open("rb") as stream:
        refuse((stream.read(len(_MAGIC)) != _MAGIC, f"{name} is no GGUF file: it does not begin with GGUF"))
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{name}: GGUF files need the package gguf: pip install gguf") from None
    try:
        fields = GGUFReader(file).fields
        architecture = fields["general.architecture"].contents()
        keys = {
            "context_length": f"{architecture}.context_length",
            "eos_token_id": "tokenizer.ggml.eos_token_id",
            "tokens": "tokenizer.ggml.tokens",
        }
        missing = [key for key in keys.values() if key not in fields]
        ends = [
            fields[key].contents() for key in (keys["eos_token_id"], "tokenizer.ggml.eot_token_id") if key in fields
        ]
        context = fields[keys["context_length"]].contents() if keys["context_length"] in fields else None
    except Exception as error:  # whatever the package stumbles over in a file that someone else wrote
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"{name} is damaged or cut short: {reason}") from None
    refuse((missing, f"{name}: its metadata have no {', '.join(missing)}"))
    return {"context_length": context, "eos_token_ids": sorted(set(ends))}


def complete(model: Any, name: str) -> None:
    """Give a model that came out of a GGUF file its name, its EOS and its context, and the look of any other model."""
    known = metadata(name)
    model.config.name_or_path = name
    model.config.get_text_config().max_position_embeddings = known["context_length"]
    model.generation_config.eos_token_id = known["eos_token_ids"]
    if hasattr(model.config, "quantization_config"):  # the weights are dequantised
        del model.config.quantization_config
