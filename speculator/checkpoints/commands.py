"""Shell lines that start servers: every word is quoted where a shell would split or change it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from speculator.target.gguf.file import is_gguf

BASE = "BASE"
"""Word of a line that stands for the target."""


def line(base: str | None, *words: str) -> str:
    """Return the words as a quoted shell line, with `base`, the target's name, in place of BASE unless it is None."""
    return shlex.join((base or BASE) if word == BASE else word for word in words)


def line_for_folder(base: str | None, *words: str) -> str:
    """Return `line` for a server that reads no GGUF; if `base` is a GGUF file, `speculator dequantise` comes first."""
    if not (base and is_gguf(base)):
        return line(base, *words)
    folder = str(Path(base).with_suffix(""))
    return (
        f"{line(base, 'speculator', 'dequantise', '--target', BASE, '--output', folder)}, then {line(folder, *words)}"
    )


def vllm(base: str | None, *environment: str, **options: Any) -> str:
    """Return the `vllm serve` line after `environment` (A=1 ...); `options` become `--speculative-config`, as JSON."""
    return line_for_folder(base, *environment, "vllm", "serve", BASE, "--speculative-config", json.dumps(options))
