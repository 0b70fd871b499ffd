"""The weight files of a checkpoint folder: which they are, and a look at what they claim before any of it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from speculator.errors import UserError, first_line, refuse
from speculator.files import MOST_BYTES, parse_json, read_text

CONFIG = "config.json"
# In the order in which transformers prefers them. An index lists the files of a checkpoint that was cut in several.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_object(file: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON file of at most so many bytes that holds an object.

    Raises:
        UserError: it can't be read, or holds something else.
    """
    read = parse_json(read_text(file, most), str(file))
    refuse((not isinstance(read, dict), f"{file}: not a JSON object"))
    return read


def weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files with a folder's weights, and of each the tensors that the index says it holds; None without an index.

    Raises:
        UserError: there are none, or the index is damaged or names what is not there.
    """
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{folder}: no weights there; looked for {', '.join(WEIGHTS)}")
    if found.suffix != ".json":
        return {found: None}
    listed = read_object(found).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(shard, str) for shard in listed.values()):
        raise UserError(f"{found}: no weight_map from tensor names to file names in it")
    shards: dict[Path, set[str] | None] = {}
    for shard in sorted(set(listed.values())):
        refuse(
            (Path(shard).name != shard or "\0" in shard, f"{found}: {shard!r} is not a file name"),
            (not (folder / shard).is_file(), f"{folder}: the shard {shard} is missing"),
        )
        shards[folder / shard] = {name for name, where in listed.items() if where == shard}
    return shards


def check_headers(folder: Path) -> int:
    """Look at the headers of a folder's weight files; gives their bytes.

    Raises:
        UserError: as `weight_files`, or a safetensors file that is cut short or damaged.
    """
    files = weight_files(folder)
    for file in files:
        if file.suffix == ".safetensors":
            read_header(file)
    return sum(file.stat().st_size for file in files)


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes in a safetensors file, which is not loaded.

    Raises:
        UserError: a file that is cut short or damaged.
    """
    try:
        with safe_open(file, "pt") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{file}: damaged: {first_line(error)}") from None
