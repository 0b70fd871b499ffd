"""The header of a GGUF file, read in a third of a second, and transformers' loader with it in place of its own reader.

transformers' loader reads each of 150,000 tokens, and as many merges, through numpy's memory map, once for the config,
once for the tokenizer and once for the weights. It dequantises sixteen rows at a time, which is mostly overhead.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from struct import unpack_from
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {"B": 1, "b": 1, "H": 2, "h": 2, "I": 4, "i": 4, "f": 4, "?": 1, "Q": 8, "q": 8, "d": 8}
_BYTES_AT_ONCE = 2**17  # of quantised weights: what is made of them fits a core's cache


class Tensor(NamedTuple):
    """A tensor in a GGUF file.

    Attributes:
        tensor_type: member of `gguf.GGMLQuantizationType`.
        data: read-only view of the memory-mapped file, in torch's order of dimensions: [..., numbers of a row], or in
            uint8 [..., bytes of a row's blocks] if the type is quantised or unknown to numpy, such as bfloat16.
    """

    name: str
    tensor_type: Any
    data: np.ndarray


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a GGUF file.

    Attributes:
        fields: metadata: numbers, strings and lists, by key.
        types: GGUF's number of each field's type; for a list, that of its elements.
        tensors: the tensors, none of which is read yet.
        digest: SHA-256 of all bytes before the tensors' data.
    """

    fields: dict[str, Any]
    types: dict[str, int]
    tensors: list[Tensor]
    digest: str

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return self.fields["general.architecture"]


class _Cursor:
    """Reads values one after the other; a file that ends too early raises struct.error."""

    def __init__(self, mapped: mmap.mmap):
        self.mapped, self.position = mapped, len(MAGIC)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        found = unpack_from(f"<{count}{form}", self.mapped, self.position)
        self.position += count * _SIZES[form]
        return found

    def strings(self, count: int) -> list[str]:
        mapped, position, found = self.mapped, self.position, []
        for _ in range(count):  # the loop of 300,000: nothing is called that need not be
            end = position + 8 + unpack_from("<Q", mapped, position)[0]
            found.append(mapped[position + 8 : end].decode())
            position = end
        self.position = position
        return found

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self) -> tuple[int, Any]:
        """Return the type of a field (of its elements, for a list) and its value."""
        (kind,) = self.numbers("I")
        if kind != _ARRAY:
            return kind, self.string() if kind == _STRING else self.numbers(_NUMBERS[kind])[0]
        (kind,), (count,) = self.numbers("I"), self.numbers("Q")
        return kind, self.strings(count) if kind == _STRING else list(self.numbers(_NUMBERS[kind], count))


@lru_cache(maxsize=2)  # a target and a draft model
def read_header(file: Path, changed: int) -> Header:
    """Read a GGUF file's header, last `changed` at this time; a damaged file raises any exception."""
    import gguf

    with file.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped)
    (version,), (tensor_count, field_count) = cursor.numbers("I"), cursor.numbers("Q", 2)
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, not 2 or 3")
    fields, types = {}, {}
    for _ in range(field_count):
        key = cursor.string()
        types[key], fields[key] = cursor.value()
    places = []
    for _ in range(tensor_count):
        name, (dimensions,) = cursor.string(), cursor.numbers("I")
        shape = cursor.numbers("Q", dimensions)[::-1]  # a file names the dimension that varies fastest first
        places.append((name, shape, *cursor.numbers("I"), *cursor.numbers("Q")))
    alignment = fields.get("general.alignment", 32)
    begin = -(-cursor.position // alignment) * alignment
    tensors = [
        Tensor(name, gguf.GGMLQuantizationType(kind), _mapped(mapped, begin + offset, shape, kind))
        for name, shape, kind, offset in places
    ]
    return Header(fields=fields, types=types, tensors=tensors, digest=hashlib.sha256(mapped[:begin]).hexdigest())


def _mapped(mapped: mmap.mmap, offset: int, shape: tuple[int, ...], kind: int) -> np.ndarray:
    """Return a tensor's numbers, or the bytes of its blocks, without reading them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    type_ = GGMLQuantizationType(kind)
    plain = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32}
    dtype: Any = plain.get(type_.name, np.uint8)
    if dtype is np.uint8:
        numbers, size = GGML_QUANT_SIZES[type_]
        shape = (*shape[:-1], shape[-1] // numbers * size)
    return np.frombuffer(mapped, dtype, int(np.prod(shape)), offset).reshape(shape)


class _Field(NamedTuple):
    """A field as transformers' loader reads it; a value of unknown type is taken as it is."""

    parts: list[Any]
    data: range
    types: list[None]


class _Reader:
    """Stands in for `gguf.GGUFReader`."""

    def __init__(self, file: str):
        header = read_header(Path(file), Path(file).stat().st_mtime_ns)
        self.tensors, self.fields = header.tensors, {}
        for key, value in header.fields.items():
            parts = value if isinstance(value, list) else [value]
            self.fields[key] = _Field(parts, range(len(parts)), [None])


@contextmanager
def quick_loader() -> Iterator[None]:
    """Let transformers' GGUF loader read headers, dequantise and look up names by faster code."""
    import gguf

    def dequantise(data: np.ndarray, kind: Any) -> np.ndarray:
        if kind.name in ("F32", "F16"):
            return slow["dequantize"](data, kind)
        rows = data.reshape(-1, data.shape[-1])
        made = np.empty((len(rows), *gguf.quant_shape_from_byte_shape(rows.shape[1:], kind)), np.float32)
        step = max(1, _BYTES_AT_ONCE // rows.shape[1])
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            # As one long row: the package takes sixteen rows at a time, whatever their length.
            made[begin : begin + step] = slow["dequantize"](some.reshape(1, -1), kind).reshape(len(some), -1)
        return made.reshape(*data.shape[:-1], made.shape[-1])

    quick = {
        "GGUFReader": _Reader,
        "dequantize": dequantise,
        "get_tensor_name_map": lru_cache(gguf.get_tensor_name_map),  # called for each part of a model
    }
    slow = {name: getattr(gguf, name) for name in quick}
    try:
        for name, each in quick.items():
            setattr(gguf, name, each)
        yield
    finally:
        for name, each in slow.items():
            setattr(gguf, name, each)
