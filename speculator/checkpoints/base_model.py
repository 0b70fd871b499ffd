"""The matrices of a head's base model, read from its files on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor
from transformers import PreTrainedConfig

from speculator.checkpoints import files
from speculator.checkpoints.layout import base_config, located
from speculator.errors import UserError, refuse
from speculator.heads.base import SpeculatorConfig
from speculator.heads.mlp.model import MLPSpeculator
from speculator.target.fingerprint import has_matrix, sample_indices
from speculator.target.gguf.file import is_gguf
from speculator.target.loading import auto_class

Which = Literal["embedding", "output"]


def base_matrix(config: Any, which: Which) -> Tensor:  # [V, D]
    """Read a matrix from the files of the base model in a head's config, for a layout that stores a copy of it.

    Raises a UserError if the files lack the matrix or its values don't fit the fingerprint in the config.
    """
    name, known = config.base_model_name_or_path, base_config(config.base_model_name_or_path)
    if (absent := lack_of(config, which)) or known is None:
        raise UserError(str(absent))
    where = _where(name, which)
    found, trained_for = _read(name, known, which), config.base_model_fingerprint
    shape = [config.vocab_size, config.emb_dim]
    if found is None:
        raise UserError(f"{where} has none in safetensors files")
    refuse(
        (list(found.shape) != shape, f"{where} has one of shape {list(found.shape)}, not {shape}"),
        (
            trained_for is not None and not _fits(trained_for, which, found),
            f"{where} has other weights than the head was trained for: --base_model names the folder of those, such as "
            "that of the same revision",
        ),
    )
    return found


def lack_of(config: Any, which: Which) -> str | None:
    """Return why the base model in a head's config has no matrix to copy, without reading one; None: it may have."""
    name = config.base_model_name_or_path
    if base_config(name) is None:
        missing = "is not on this machine: --base_model names a folder or a model in the hub's cache"
    elif is_gguf(name):
        missing = "is a GGUF file: --base_model names the folder that `speculator dequantise` writes of it"
    elif not _folder(name):
        missing = "has none in safetensors files"
    else:
        return None
    return f"{_where(name, which)} {missing}"


def _where(name: str | None, which: Which) -> str:
    what = "embedding" if which == "embedding" else "output matrix"
    return f"the layout stores the target's {what}, but {name or 'the base model'}"


def needs_embedding(config: Any) -> str | None:
    """Return `lack_of` for a head that reads its target's embedding, and None for one that has its own."""
    return None if config.own_embedding else lack_of(config, "embedding")


def with_own_embedding(head: MLPSpeculator) -> MLPSpeculator:
    """Return a head with an embedding of its own, made from the base model's (see `base_matrix`) if it reads that."""
    if head.config.own_embedding:
        return head
    return head.with_own_embedding(base_matrix(head.config, "embedding").to(head.device))


def same_matrices(config: SpeculatorConfig) -> bool | None:
    """Return whether the base model's embedding and output matrix fit the fingerprint in a head's config.

    None: one of them is missing, or the base model is a GGUF file.
    """
    name, trained_for = config.base_model_name_or_path, config.base_model_fingerprint
    known = base_config(name)
    if known is None or name is None or trained_for is None or is_gguf(name):
        return None
    kinds: tuple[Which, ...] = ("embedding", "output")
    for which in kinds:
        found = _read(name, known, which)
        if found is None or not _fits(trained_for, which, found):
            return None if found is None else False
    return True


def _fits(trained_for: str, which: Which, matrix: Tensor) -> bool:
    return has_matrix(trained_for, which, matrix[sample_indices(*matrix.shape)])


def _folder(name: str) -> Path | None:
    """Return the folder of the model `name`, a folder or cached hub id; None if it has no safetensors files."""
    name = located(name)
    # In the hub's cache the folder of a revision is found by one of its files.
    cached = None if Path(name).is_dir() else try_to_load_from_cache(name, files.CONFIG)
    folder = Path(cached).parent if isinstance(cached, str) else Path(name)
    return folder if any((folder / weights).is_file() for weights in files.SAFETENSORS) else None


def _read(name: str, config: PreTrainedConfig, which: Which) -> Tensor | None:
    """Read the embedding or output matrix of the model `name`, a folder or cached hub id; None if it is not there."""
    folder = _folder(name)
    if folder is None:
        return None
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    # Of a tied model the files may hold another output matrix all the same, and then it is untied, as in transformers.
    tied = which == "output" and output.weight is embedding.weight
    parts = [embedding] if which == "embedding" else [output, *[embedding] * tied]
    names = [f"{own}.weight" for part in parts for own, module in model.named_modules() if module is part]
    shards = files.read_shards(folder)
    # The prefix depends on who saved the files, and MTP layers have longer names of the same end.
    ends = ["." + ".".join(name.split(".")[-2:]) for name in names]
    stored = next((each for end in ends for each in sorted(shards, key=len) if f".{each}".endswith(end)), None)
    refuse((stored is None, f"{folder}: no {names[-1]} in its safetensors files"))
    if not (folder / shards[str(stored)]).is_file():  # a run with its target in servers downloads what it reads
        return None
    with files.opened(folder / shards[str(stored)]) as file:
        return file.get_tensor(stored)
