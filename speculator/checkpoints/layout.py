"""What every checkpoint layout shares: the table of a head's tensors, reading by it, and a proved write.

A layout is a config.json of certain fields and a set of tensor names. Loaders elsewhere skip names that they do not
know and leave alone what they do not find; here the names, shapes and dtypes have to be exactly the table's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from speculator.checkpoints import files
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.files import new_folder
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.target.gguf import read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE: dict[str, type] = {
    "vocab_size": int,
    "emb_dim": int,
    "inner_dim": int,
    "n_predict": int,
    "tie_weights": bool,
    "scale_input": bool,
}
KEPT: dict[str, type] = {
    "base_model_name_or_path": str,
    "base_model_adapter": str,
    "base_model_fingerprint": str,
    "trained_length": int,
    "training_data": list,
    "draft_vocab_size": int,
    "top_k_tokens_per_head": list,
    "n_candidates": int,
}
PREFIX = "speculator."  # of the tensor names in servers' layouts; read with or without
_DRAFT_TOKENS = "draft_tokens"


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
    """One checkpoint layout of one kind of head.

    Attributes:
        name: what the user types.
        head: the kind of head; another kind has another layout of this name, or none.
        architecture: `architectures[0]` of its config.json, by which a folder is recognised.
        fields: config.json as written, from the head's config and the name of its dtype.
        servers: who loads a head of this config from the folder that is named, and how.
        prefix: of the tensor names, as written.
        defaults: what a field of the shape means where config.json leaves it out; others have to be there.
        expandable: whether its loaders take tied tensors under every head's name.
        translate: config.json as read, into the names that heads here give the fields; may raise a UserError.
        bare: whether its loaders find tensors by names without prefix only.
        also: other architectures that its loaders take for this one.
        mark: a field that its config.json has and no other layout's, where the architecture's name does not tell.
        shape: the fields that have to be there, and what they are.
        kept: the fields beside the shape that are read into the head's config, and what they are.
        pack: a head's tensors as they are stored, where these are not its own under their names.
        unpack: the stored tensors as the head has them; may raise a UserError that names the folder.
    """

    name: str
    head: type[Speculator]
    architecture: str
    fields: Callable[[Any, str], dict[str, Any]]
    servers: Callable[[Any, str], list[Server]]
    prefix: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    expandable: bool = False
    translate: Callable[[dict[str, Any], Path], dict[str, Any]] = lambda read, file: read
    bare: bool = False
    also: tuple[str, ...] = ()
    mark: str | None = None
    shape: dict[str, type] = field(default_factory=lambda: SHAPE)
    kept: dict[str, type] = field(default_factory=lambda: KEPT)
    pack: Callable[[Any], dict[str, Tensor]] | None = None
    unpack: Callable[[Path, Any, dict[str, Tensor]], dict[str, Tensor]] = lambda where, head, tensors: tensors

    def carries(self, config: SpeculatorConfig) -> bool:
        """Whether it has a place for a head's draft vocabulary, if there is one."""
        return config.draft_vocab_size is None or "draft_vocab_size" in self.kept


def tensor_shapes(head: Speculator, expand_tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor's name, without prefix, and shape; of a tied head each once, or by `expand_tied` once per head."""
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    return shapes | {name: shapes[source] for name, source in head.aliases().items()} if expand_tied else shapes


def load(folder: str | Path, layout: Layout) -> Speculator:
    """The head in a folder of this layout, on the CPU, in the dtype that it is stored in.

    Raises:
        UserError: a field of config.json that is absent or wrong; a tensor that is missing, surplus, of another shape
            or dtype, or not finite; tied tensors that differ; a damaged file.
    """
    folder = Path(folder)
    config = _read_config(folder, layout)
    tensors = files.read_tensors(folder)
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        refuse((layout.bare, f"{folder}: its tensor names start with {PREFIX}, but this layout's are found bare only"))
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    try:
        with torch.device("meta"):  # no memory and no time for weights that are replaced at once
            head = layout.head(config)
    except (RuntimeError, TypeError, OverflowError):
        raise UserError(f"{folder / files.CONFIG}: no tensor can have the sizes that it says") from None
    tensors = layout.unpack(folder, head, tensors)
    _check_tensors(folder, head, tensors)
    # Copies: what is read where it lies in a file is not aligned, and a product of such rounds otherwise.
    head.load_state_dict({name: tensors.pop(name).clone() for name in tensor_shapes(head)}, assign=True)
    return head.eval()


def save(head: Speculator, folder: str | Path, layout: Layout, expand_tied: bool = False) -> None:
    """Write a head in this layout, then read it back: config, names, shapes, dtype, weights and logits are compared.

    The folder appears under its name when all of that held, or not at all.

    Raises:
        UserError: the folder is there and not empty, can't be written, or does not hold; weights that are not finite,
            or of mixed dtypes; `expand_tied` where there is nothing to expand or nobody to read it; a draft vocabulary
            in a layout that has no place for it.
    """
    folder = Path(folder).resolve()
    config: Any = head.config
    held = head.state_dict()
    refuse(
        (type(head) is not layout.head, f"this is no {layout.architecture}: the head is a {type(head).__name__}"),
        (folder.is_file() or (folder.is_dir() and any(folder.iterdir())), f"{folder} is there already and not empty"),
        (
            not layout.carries(config),
            f"{layout.name} has no place for a draft vocabulary: its loaders want {config.vocab_size} rows in an "
            f"output matrix, and this head has {config.draft_vocab_size}; native and vllm-plugin keep it",
        ),
        (
            expand_tied and not head.aliases(),
            "--expand-tied: this head is not tied, each of its tensors is written anyway",
        ),
        (expand_tied and not layout.expandable, f"--expand-tied: {layout.name} stores a tied tensor once"),
    )
    _check_tensors("the head", head, held)
    aliases = head.aliases()
    written = {layout.prefix + name: held[aliases.get(name, name)] for name in tensor_shapes(head, expand_tied)}
    if layout.pack is not None:
        written = layout.pack(head)
    with new_folder(folder) as scratch:
        files.write(scratch, layout.fields(config, dtype_name(head.dtype)), written)
        _prove(head, scratch, layout, written)


def base_config(name: str | None) -> PreTrainedConfig | None:
    """The base model's text config, if it is a folder or in the hub's cache: nothing is fetched."""
    try:
        return read_config(name, local_files_only=True).get_text_config() if name else None
    except Exception:  # whatever lies there, it is no config that can be read
        return None


def _read_config(folder: Path, layout: Layout) -> SpeculatorConfig:
    file = folder / files.CONFIG
    read = {**layout.defaults, **layout.translate(files.read_config(folder), file)}
    kept = {name: read[name] for name in layout.kept if read.get(name) is not None}
    for name, kind in {**layout.shape, **{name: layout.kept[name] for name in kept}}.items():
        refuse(
            (name not in read, f"{file}: no {name} in it"),
            (type(read.get(name)) is not kind, f"{file}: {name} is {read.get(name)!r}, not {kind.__name__}"),
        )
    for name, kind in layout.shape.items():
        least = 0 if name == "inner_dim" else 1  # an inner_dim of 0 means emb_dim
        refuse((kind is int and read[name] < least, f"{file}: {name} is {read[name]}"))
    # ArcticTraining's writer misspells it. The list itself says nothing about the weights, but a list for another
    # number of heads says that n_predict is wrong, which changes alpha and shows nowhere else in a tied head.
    widths = read.get("top_k_tokens_per_head", read.get("top_k_tokesns_per_head"))
    if widths is not None and (not isinstance(widths, list) or len(widths) != read["n_predict"]):
        raise UserError(f"{file}: top_k_tokens_per_head is {widths!r}, but n_predict is {read['n_predict']}")
    try:
        return layout.head.config_class(**{name: read[name] for name in layout.shape}, **kept)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{file}: {error}") from None


def _check_tensors(where: object, head: Speculator, tensors: dict[str, Tensor]) -> None:
    """Exactly the table's tensors, or with tied ones under every head's name, all of one float dtype and finite."""
    expected, full, aliases = tensor_shapes(head), tensor_shapes(head, expand_tied=True), head.aliases()
    surplus = set(tensors) - set(full)
    if not surplus and not set(expected) - set(tensors) and set(tensors) != set(expected):
        expected = full
    missing = set(expected) - set(tensors)
    ties = type(head).aliases is not Speculator.aliases
    tied = f" (tie_weights is {str(head.config.tie_weights).lower()})" if ties else ""
    refuse(
        (surplus, f"{where}: tensors that do not belong here{tied}: {_list(surplus)}"),
        (missing, f"{where}: tensors that are missing{tied}: {_list(missing)}"),
    )
    dtypes = sorted({dtype_name(tensor.dtype) for name, tensor in tensors.items() if name != _DRAFT_TOKENS})
    refuse((len(dtypes) > 1 or dtypes[0] not in DTYPES, f"{where}: stored as {', '.join(dtypes)}, not one float dtype"))
    for name, shape in expected.items():
        tensor, source = tensors[name], aliases.get(name, name)
        refuse(
            (tensor.shape != shape, f"{where}: {name} is {list(tensor.shape)}, config.json says {list(shape)}"),
            (not tensor.isfinite().all(), f"{where}: {name} has values that are not finite"),
            (source != name and not tensor.equal(tensors[source]), f"{where}: tied, but {name} is not {source}"),
        )
    if _DRAFT_TOKENS in expected:
        _check_draft_tokens(where, tensors[_DRAFT_TOKENS], head.config.vocab_size)


def _check_draft_tokens(where: object, tokens: Tensor, vocab_size: int) -> None:
    """Distinct tokens of the vocabulary in ascending order: no two rows of an output matrix are of one token."""
    stored = dtype_name(tokens.dtype)
    refuse(
        (tokens.dtype != torch.int64, f"{where}: {_DRAFT_TOKENS} is stored as {stored}, not int64"),
        (
            (tokens < 0).any() or (tokens >= vocab_size).any(),
            f"{where}: {_DRAFT_TOKENS} holds tokens outside the vocabulary of {vocab_size}",
        ),
        ((tokens.diff() <= 0).any(), f"{where}: {_DRAFT_TOKENS} are not distinct tokens in ascending order"),
    )


def _list(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@torch.no_grad()
def _prove(head: Speculator, folder: Path, layout: Layout, written: dict[str, Tensor]) -> None:
    """What was written has the fields and the tensors of the layout, and is this head."""
    config: Any = head.config
    stored = files.read_tensors(folder)
    again: Any = load(folder, layout)
    again.to(head.device)
    inputs = head.probe()
    weights = again.state_dict()
    held = {
        "config.json": files.read_config(folder) == layout.fields(config, dtype_name(head.dtype)),
        "tensors": stored.keys() == written.keys() and all(_same(stored[name], written[name]) for name in stored),
        "weights": all(torch.equal(weights[name], tensor) for name, tensor in head.state_dict().items()),
        "logits": torch.equal(again.logits(*inputs), head.logits(*inputs)),
    }
    failed = [name for name, holds in held.items() if not holds]
    if failed:
        raise UserError(f"what was written is not this head: its {', '.join(failed)} differ; nothing was kept")


def _same(stored: Tensor, written: Tensor) -> bool:
    return stored.dtype == written.dtype and torch.equal(stored, written.cpu())
