"""Shared parts of all checkpoint layouts: expected tensors, checked reading, and writing with a read-back.

A layout is a config.json with certain fields and a set of tensor names. Servers' loaders ignore unknown names and leave
missing weights random; here names, shapes and dtypes must match exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from inspect import formatannotation, get_annotations
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from speculator.checkpoints import files
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.table import Lack, Table, fields_in, from_json, only, same, to_json
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.files import JsonObject, check_new_folder, new_folder
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.target.gguf.file import read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ORIGIN = same(
    *("base_model_name_or_path", "base_model_adapter", "base_model_fingerprint"),
    *("trained_length", "training_data"),
    optional=True,
)
"""Rows of the fields about where a head comes from."""
PREFIX = "speculator."  # of tensor names in servers' layouts; read with or without
_DRAFT_TOKENS = "draft_tokens"
_JSON: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}
_WIDTHS = {"top_k_tokens_per_head": list, "n_candidates": int}
_SIZES = {
    *("vocab_size", "emb_dim", "inner_dim", "n_predict", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
}
"""Fields that are refused below 1."""


@dataclass(frozen=True)
class Server:
    """A program that may load a layout.

    Attributes:
        name: program and versions.
        loads: whether it loads this head; None if untested.
        how: how to start it, or the reason that it does not load.
        ran: `loads` was seen in a run; False: it was read in the program's source.
    """

    name: str
    loads: bool | None
    how: str
    ran: bool = field(default=True, kw_only=True)

    @classmethod
    def of(cls, name: str, refused: str | None, how: str, ran: bool = True) -> Server:
        """Return the entry of a program that loads the head as `how` says, unless there is a reason that it can't."""
        return cls(name, not refused, refused or how, ran=ran)

    @property
    def verdict(self) -> str:
        """`loads` in words, before a server's name: "loads in", "DOES NOT LOAD in" or "not tried in"."""
        if self.loads and not self.ran:
            return "by its source, loads in"
        return {True: "loads in", False: "DOES NOT LOAD in", None: "not tried in"}[self.loads]


@dataclass(frozen=True)
class Layout:
    """Checkpoint layout of one kind of head.

    Attributes:
        name: name for the user, unique among the layouts of a kind of head.
        head: class of the heads.
        architecture: `architectures[0]` of config.json, which identifies the layout.
        table: where config.json holds each field of the head's config, and what the layout can't hold.
        servers: lists the programs for a head's config and folder.
        prefix: prefix of the tensor names when written.
        canonical: converts a config.json of other writers, given its path for errors, to the form that `table`
            describes.
        also: further names of the architecture.
        mark: field of config.json that tells this layout from others of the same architecture name.
        pack: converts a head's tensors to stored ones; None: stored under their own names.
        unpack: converts stored tensors to the head's.
        adapt: converts a head to one that the layout can store and that drafts the same.
        needs: returns what an export lacks besides the head, given its config: a message, or None.
        written: writes config.json in place of `table`, which then is only read.
        write: writes a head into a folder, given the result of `fields`, and checks what it wrote; None: the layout is
            config.json and model.safetensors. Without `read_config` and `read`, no command reads other layouts.
        read_config, read: read the config, and the weights by the head's names, from a folder that `write` wrote.
    """

    name: str
    head: type[Speculator]
    architecture: str
    table: Table
    servers: Callable[[Any, str], list[Server]]
    prefix: str = ""
    canonical: Callable[[ForeignConfig, Path], ForeignConfig] = lambda read, file: read
    also: tuple[str, ...] = ()
    mark: str | None = None
    pack: Callable[[Any], dict[str, Tensor]] | None = None
    unpack: Callable[[Path, Any, dict[str, Tensor]], dict[str, Tensor]] = lambda where, head, tensors: tensors
    adapt: Callable[[Any], Speculator] = lambda head: head
    needs: Callable[[Any], str | None] = lambda config: None
    written: Callable[[Any, str], JsonObject] | None = None
    write: Callable[[Any, JsonObject, Path], None] | None = None
    read_config: Callable[[Path], SpeculatorConfig] | None = None
    read: Callable[[Path, Any], dict[str, Tensor]] | None = None

    def stores(self, head: Speculator) -> bool:
        return not self.refusal(head)

    def refusal(self, head: Speculator) -> str | None:
        """Return why a head can't be exported to this layout, by its class and config alone; None: it can."""
        try:
            self.fields_of(head)
        except UserError as error:
            return str(error)
        return None

    def fields_of(self, head: Speculator) -> JsonObject:
        """Return the content of a head's config.json, if the layout can store the head."""
        refuse((type(head) is not self.head, f"{self.architecture} can't store a {type(head).__name__}"))
        return self.fields(head.config, dtype_name(head.dtype))

    def fields(self, config: Any, dtype: str) -> JsonObject:
        if self.written:
            return self.written(config, dtype)
        content = to_json(self.table, config, dtype)
        return content if self.write else {"architectures": [self.architecture], **content}

    def read_fields(self, read: ForeignConfig, file: Path) -> ForeignConfig:
        """Return the fields of a head's config, given the content of config.json and its path for errors."""
        canonical = self.canonical(read, file)
        fields: ForeignConfig = {**from_json(self.table, canonical, file)}
        kinds = declared_fields(self.head.config_class) | _WIDTHS
        for name, value in fields.items():
            kind = kinds[name]
            wrong = type(value) is not kind
            least = 0 if name == "inner_dim" else 1  # an inner_dim of 0 stands for emb_dim
            refuse(
                (wrong, f"{file}: {name} must be {kind.__name__}, got {value!r}"),
                (not wrong and name in _SIZES and value < least, f"{file}: {name} is {value}"),
            )
        # ArcticTraining misspells the key. A list for another number of heads shows that n_predict is wrong, which
        # changes alpha and shows nowhere else in a tied head.
        widths = canonical.get("top_k_tokens_per_head", canonical.get("top_k_tokesns_per_head"))
        if widths is not None and (not isinstance(widths, list) or len(widths) != fields["n_predict"]):
            raise UserError(f"{file}: top_k_tokens_per_head is {widths!r}, but n_predict is {fields['n_predict']}")
        return fields


def whole_vocabulary(name: str) -> Lack:
    """Return the row of the layout of this name that says that it has no draft vocabularies."""
    return only(
        "draft_vocab_size",
        None,
        f"{name} can't store a draft vocabulary: its loaders need {{0.vocab_size}} rows in the output matrix, and this "
        "head has {0.draft_vocab_size}; `speculator inspect` lists the layouts that can",
    )


@cache
def declared_fields(config: type[SpeculatorConfig]) -> dict[str, type]:
    """Return the fields of JSON types that a head's config class and its bases declare, with their types."""
    found: dict[str, type] = {}
    for kind in config.__mro__[: config.__mro__.index(PreTrainedConfig)]:
        for name, hint in get_annotations(kind).items():
            # "int | None" counts as int: a field that may be absent is optional.
            word = re.match(r"\w+", hint if isinstance(hint, str) else formatannotation(hint))
            if word and word[0] in _JSON:
                found.setdefault(name, _JSON[word[0]])
    return found


def tensor_shapes(head: Speculator) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape by its name in the head."""
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def load(folder: str | Path, layout: Layout) -> Speculator:
    """Load a head in this layout to the CPU, in its stored dtype and in eval mode.

    Raises a UserError if config.json is malformed, if tensor names or shapes don't match it, or if the weights are not
    finite numbers of one float dtype.
    """
    folder = Path(folder)
    config = load_config(folder, layout)
    try:
        with torch.device("meta"):  # allocates no memory: the weights are replaced below
            head = layout.head(config)
    except (RuntimeError, TypeError, OverflowError):
        raise UserError(f"{folder / files.CONFIG}: its sizes are impossible for a tensor") from None
    weights = layout.read(folder, head) if layout.read else _read_weights(folder, head, layout)
    head.load_state_dict(weights, assign=True)
    return head.eval()


def load_config(folder: Path, layout: Layout) -> SpeculatorConfig:
    try:
        if layout.read_config:
            return layout.read_config(folder)
        return layout.head.config_class(**layout.read_fields(files.read_config(folder), folder / files.CONFIG))
    # Values of other types fail anywhere, also in transformers.
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{folder / files.CONFIG}: missing or malformed: {error}") from None


def save(head: Speculator, folder: str | Path, layout: Layout) -> Speculator:
    """Write a head in this layout, read it back, and compare config, tensors, weights and logits.

    The folder appears only if all of them agree. Returns the head as the layout stores it (`Layout.adapt`).
    """
    folder = Path(folder).resolve()
    check_new_folder(folder)
    made = layout.fields_of(head)
    head = layout.adapt(head)
    stored = head.state_dict()
    _check_tensors("the head", head, stored)
    written = layout.pack(head) if layout.pack else {layout.prefix + name: each for name, each in stored.items()}
    with new_folder(folder) as scratch:
        if layout.write is not None:
            layout.write(head, made, scratch)
        else:
            files.write(scratch, made, written)
            _compare(head, scratch, layout, written)
    return head


_FOLDERS: dict[str, str] = {}


@contextmanager
def base_in(name: str, folder: str) -> Iterator[None]:
    """Read the base model `name` from a folder inside the block: a head keeps its hub id while a matrix is read."""
    _FOLDERS[name] = folder
    try:
        yield
    finally:
        del _FOLDERS[name]


def located(name: str) -> str:
    """Return the folder of `base_in` for a base model, or its own name."""
    return _FOLDERS.get(name, name)


def base_config(name: str | None) -> PreTrainedConfig | None:
    """Return the config of a base model (folder, GGUF file, cached hub id), None if unreadable; download nothing."""
    try:
        return read_config(located(name), local_files_only=True) if name else None
    except Exception:  # not a config that transformers can read
        return None


def _read_weights(folder: Path, head: Speculator, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors in a folder by the head's names, checked against the head."""
    tensors = files.read_tensors(folder)
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    tensors = layout.unpack(folder, head, tensors)
    _check_tensors(folder, head, tensors)
    # Copied, because memory-mapped tensors are not aligned, which changes the rounding of products.
    return {name: tensors.pop(name).clone() for name in tensor_shapes(head)}


def _check_tensors(where: object, head: Speculator, tensors: dict[str, Tensor]) -> None:
    """Raise a UserError unless names and shapes are the head's, weights have one float dtype, and values are finite.

    Tied tensors may be stored once or under every position's name. `where` begins the message.
    """
    expected, aliases = tensor_shapes(head), head.aliases()
    full = expected | {name: expected[source] for name, source in aliases.items()}
    unexpected = set(tensors) - set(full)
    # A tied tensor may be stored once, or under the name of every position; a part of the names is neither.
    if not unexpected and not set(expected) - set(tensors) and set(tensors) != set(expected):
        expected = full
    missing = set(expected) - set(tensors)
    can_tie = type(head).aliases is not Speculator.aliases
    tied = f" (tie_weights is {str(head.config.tie_weights).lower()})" if can_tie else ""
    refuse(
        (unexpected, f"{where}: unexpected tensors{tied}: {_listed(unexpected)}"),
        (missing, f"{where}: missing tensors{tied}: {_listed(missing)}"),
    )
    others = dict(head.named_buffers())  # the draft vocabulary, and what routers add to their scores
    dtypes = sorted({dtype_name(tensor.dtype) for name, tensor in tensors.items() if name not in others})
    refuse((len(dtypes) > 1 or dtypes[0] not in DTYPES, f"{where}: stored as {', '.join(dtypes)}, not one float dtype"))
    for name, shape in expected.items():
        tensor, source = tensors[name], aliases.get(name, name)
        refuse(
            (tensor.shape != shape, f"{where}: {name} is {list(tensor.shape)}, config.json says {list(shape)}"),
            (not tensor.isfinite().all(), f"{where}: {name} has values that are not finite"),
            (source != name and not tensor.equal(tensors[source]), f"{where}: {name} differs from {source}, its tie"),
        )
    if _DRAFT_TOKENS in expected:
        tokens, size = tensors[_DRAFT_TOKENS], head.config.vocab_size
        refuse(
            (tokens.dtype != torch.int64, f"{where}: {_DRAFT_TOKENS} is {dtype_name(tokens.dtype)}, not int64"),
            ((tokens < 0).any() or (tokens >= size).any(), f"{where}: {_DRAFT_TOKENS} exceed the vocabulary of {size}"),
            ((tokens.diff() <= 0).any(), f"{where}: {_DRAFT_TOKENS} are not distinct and ascending"),
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@torch.no_grad()
def _compare(head: Speculator, folder: Path, layout: Layout, written: dict[str, Tensor]) -> None:
    """Load a written folder; raise a UserError if config.json, tensors, weights or logits differ from the head's.

    `written` holds the tensors that were written, by their stored names.
    """
    config: Any = head.config
    stored = files.read_tensors(folder)
    tensors = stored.keys() == written.keys() and all(
        stored[name].dtype == each.dtype and torch.equal(stored[name], each.cpu()) for name, each in written.items()
    )
    del stored  # the head is read again, and may be large
    # By the same code that users call: whatever a reader would reject is found before the folder appears.
    again: Any = load(folder, layout)
    again.to(head.device)
    inputs = head.probe()
    weights = again.state_dict()
    own = {name: getattr(config, name, None) for name in fields_in(layout.table) - {row.ours for row in ORIGIN}}
    equal = {
        "settings": all(value in (None, getattr(again.config, name, None)) for name, value in own.items()),
        "config.json": files.read_config(folder) == layout.fields(config, dtype_name(head.dtype)),
        "tensors": tensors,
        "weights": all(torch.equal(weights[name], tensor) for name, tensor in head.state_dict().items()),
        "logits": torch.equal(again.logits(*inputs), head.logits(*inputs)),
    }
    if differing := [name for name, same in equal.items() if not same]:
        raise UserError(f"the written head differs in {', '.join(differing)}; nothing was kept")
