"""What every checkpoint layout of the MLP head shares: the table of tensors, reading by it, and a proved write.

A layout is a config.json of certain fields and a set of tensor names. Loaders elsewhere skip names that they do not
know and leave alone what they do not find; here the names, shapes and dtypes have to be exactly the table's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from speculator.errors import UserError, refuse
from speculator.export import files
from speculator.heads.mlp import MLPSpeculator, MLPSpeculatorConfig
from speculator.target import dtype_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE: dict[str, type] = {
    "vocab_size": int,
    "emb_dim": int,
    "inner_dim": int,
    "n_predict": int,
    "tie_weights": bool,
    "scale_input": bool,
}
_KEPT: dict[str, type] = {
    "base_model_name_or_path": str,
    "trained_length": int,
    "training_data": list,
    "top_k_tokens_per_head": list,
    "n_candidates": int,
}
_PREFIX = "speculator."  # of the tensor names in servers' layouts; read with or without


@dataclass(frozen=True)
class Server:
    """One loader of a layout.

    Attributes:
        name: who, and which versions.
        loads: whether it loads this head.
        how: how to start it, or why it does not load.
    """

    name: str
    loads: bool
    how: str


@dataclass(frozen=True)
class Layout:
    """One checkpoint layout.

    Attributes:
        name: what the user types.
        architecture: `architectures[0]` of its config.json, by which a folder is recognised.
        prefix: of the tensor names, as written.
        fields: config.json as written, from the head's config and the name of its dtype.
        defaults: what a field of the shape means where config.json leaves it out; others have to be there.
        kept: the fields beside the shape that are read into the head's config.
        servers: who loads a head of this config from the folder that is named, and how.
        expandable: whether its loaders take tied tensors under every head's name.
    """

    name: str
    architecture: str
    prefix: str
    fields: Callable[[MLPSpeculatorConfig, str], dict[str, Any]]
    defaults: dict[str, Any]
    kept: tuple[str, ...]
    servers: Callable[[MLPSpeculatorConfig, str], list[Server]]
    expandable: bool


def table(config: MLPSpeculatorConfig, expand_tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor's name, without prefix, and shape; of a tied head each once, or by `expand_tied` once per head."""
    n, inner, vocab = config.n_predict, config.inner_dim, config.vocab_size
    once = config.tie_weights and not expand_tied
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 if once else n):
        shapes |= {f"emb.{i}.weight": (vocab, inner), f"head.{i}.weight": (vocab, inner)}
        shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
    for i in range(2 if once else n):
        shapes[f"proj.{i}.weight"] = (inner, config.emb_dim if i == 0 else inner)
    return shapes


def load(folder: str | Path, layout: Layout) -> MLPSpeculator:
    """The head in a folder of this layout, on the CPU, in the dtype that it is stored in.

    Raises:
        UserError: a field of config.json that is absent or wrong; a tensor that is missing, surplus, of another shape
            or dtype, or not finite; tied tensors that differ; a damaged file.
    """
    folder = Path(folder)
    config = _read_config(folder, layout)
    tensors = files.read_tensors(folder)
    if tensors and all(name.startswith(_PREFIX) for name in tensors):
        tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    _check_tensors(folder, config, tensors)
    with torch.device("meta"):  # no memory and no time for weights that are replaced at once
        head = MLPSpeculator(config)
    head.load_state_dict({name: tensors[name] for name in table(config)}, assign=True)
    return head.eval()


def save(head: MLPSpeculator, folder: str | Path, layout: Layout, expand_tied: bool = False) -> None:
    """Write a head in this layout, then read it back: config, names, shapes, dtype, weights and logits are compared.

    The folder appears under its name when all of that held, or not at all.

    Raises:
        UserError: the folder is there and not empty, can't be written, or does not hold; weights that are not finite,
            or of mixed dtypes; `expand_tied` where there is nothing to expand or nobody to read it.
    """
    folder = Path(folder).resolve()
    scratch = folder.with_name(f"{folder.name}.partial")
    config: Any = head.config
    tied, held = config.tie_weights, head.state_dict()
    refuse(
        (folder.is_file() or (folder.is_dir() and any(folder.iterdir())), f"{folder} is there already and not empty"),
        (scratch.exists(), f"{scratch}: left by an export that was cut short; remove it"),
        (expand_tied and not tied, "--expand-tied: this head is not tied, each of its tensors is written anyway"),
        (expand_tied and not layout.expandable, f"--expand-tied: {layout.name} stores a tied tensor once"),
    )
    _check_tensors("the head", config, held)
    written = {layout.prefix + name: held[_source(name, tied)] for name in table(config, expand_tied)}
    try:
        scratch.mkdir(parents=True)
        files.write(scratch, layout.fields(config, _dtype_name(head)), written)
        _prove(head, scratch, layout, expand_tied)
        if folder.is_dir():
            folder.rmdir()
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"can't write {folder}: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def base_config(name: str | None) -> PreTrainedConfig | None:
    """The base model's text config, if it is a folder or in the hub's cache: nothing is fetched."""
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True).get_text_config() if name else None
    except (OSError, ValueError, KeyError):
        return None


def _source(name: str, tied: bool) -> str:
    """Where a head keeps this tensor: of a tied one emb.3.weight is emb.0.weight, proj.3.weight is proj.1.weight."""
    part, index, kind = name.split(".")
    return f"{part}.{min(int(index), 1 if part == 'proj' else 0)}.{kind}" if tied else name


def _read_config(folder: Path, layout: Layout) -> MLPSpeculatorConfig:
    read = {**layout.defaults, **files.read_config(folder)}
    file = folder / files.CONFIG
    kept = {name: read[name] for name in layout.kept if read.get(name) is not None}
    for name, kind in {**SHAPE, **{name: _KEPT[name] for name in kept}}.items():
        refuse(
            (name not in read, f"{file}: no {name} in it"),
            (type(read.get(name)) is not kind, f"{file}: {name} is {read.get(name)!r}, not {kind.__name__}"),
        )
    for name, kind in SHAPE.items():
        least = 1 if kind is int and name != "inner_dim" else 0  # an inner_dim of 0 means emb_dim
        refuse((read[name] < least, f"{file}: {name} is {read[name]}"))
    # ArcticTraining's writer misspells it. The list itself says nothing about the weights, but a list for another
    # number of heads says that n_predict is wrong, which changes alpha and shows nowhere else in a tied head.
    widths = read.get("top_k_tokens_per_head", read.get("top_k_tokesns_per_head"))
    if widths is not None and (not isinstance(widths, list) or len(widths) != read["n_predict"]):
        raise UserError(f"{file}: top_k_tokens_per_head is {widths!r}, but n_predict is {read['n_predict']}")
    try:
        return MLPSpeculatorConfig(**{name: read[name] for name in SHAPE}, **kept)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{file}: {error}") from None


def _check_tensors(where: object, config: MLPSpeculatorConfig, tensors: dict[str, Tensor]) -> None:
    """Exactly the table's tensors, or with tied ones under every head's name, all of one float dtype and finite."""
    expected, full = table(config), table(config, expand_tied=True)
    surplus = set(tensors) - set(full)
    if not surplus and not set(expected) - set(tensors) and set(tensors) != set(expected):
        expected = full
    missing = set(expected) - set(tensors)
    tied = f"tie_weights is {str(config.tie_weights).lower()}"
    refuse(
        (surplus, f"{where}: tensors that do not belong here ({tied}): {_list(surplus)}"),
        (missing, f"{where}: tensors that are missing ({tied}): {_list(missing)}"),
    )
    dtypes = sorted({dtype_name(tensor.dtype) for tensor in tensors.values()})
    refuse((len(dtypes) > 1 or dtypes[0] not in DTYPES, f"{where}: stored as {', '.join(dtypes)}, not one float dtype"))
    for name, shape in expected.items():
        tensor, source = tensors[name], _source(name, config.tie_weights)
        refuse(
            (tensor.shape != shape, f"{where}: {name} is {list(tensor.shape)}, config.json says {list(shape)}"),
            (not tensor.isfinite().all(), f"{where}: {name} has values that are not finite"),
            (source != name and not tensor.equal(tensors[source]), f"{where}: tied, but {name} is not {source}"),
        )


def _dtype_name(head: MLPSpeculator) -> str:
    return dtype_name(head.dtype)


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@torch.no_grad()
def _prove(head: MLPSpeculator, folder: Path, layout: Layout, expand_tied: bool) -> None:
    """What was written has the fields and the tensors of the layout, and is this head."""
    config: Any = head.config
    shapes = {layout.prefix + name: shape for name, shape in table(config, expand_tied).items()}
    stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in files.read_tensors(folder).items()}
    again: Any = load(folder, layout)
    again.to(head.device)
    hidden = torch.randn(1, 4, config.emb_dim, generator=torch.Generator().manual_seed(0)).to(head.device, head.dtype)
    tokens = torch.arange(3 + config.n_predict, device=head.device)[None] * 7 % config.vocab_size
    weights = again.state_dict()
    held = {
        "config.json": files.read_config(folder) == layout.fields(config, _dtype_name(head)),
        "tensors": stored == {name: (shape, head.dtype) for name, shape in shapes.items()},
        "weights": all(torch.equal(weights[name], tensor) for name, tensor in head.state_dict().items()),
        "logits": torch.equal(again.logits(hidden, tokens), head.logits(hidden, tokens)),
    }
    failed = [name for name, holds in held.items() if not holds]
    if failed:
        raise UserError(f"what was written is not this head: its {', '.join(failed)} differ; nothing was kept")
