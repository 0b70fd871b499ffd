"""Targets whose hidden states servers give to draft heads, by targets.yaml, which names sources and dates."""

from __future__ import annotations

from datetime import date
from functools import cache
from pathlib import Path
from typing import TypedDict

import yaml
from typing_extensions import NotRequired

from speculator.checkpoints.layout import base_config
from speculator.errors import UserError
from speculator.files import read_text
from speculator.target.gguf.file import is_gguf, metadata

VLLM, SGLANG, LLAMA_CPP = "vLLM 0.32", "SGLang 0.5.23", "llama.cpp 0.5"


class Known(TypedDict):
    """What targets.yaml has about a server; texts of model types are by the algorithms of heads."""

    source: str
    read: date
    runs: NotRequired[dict[str, str]]
    refuses: NotRequired[dict[str, str]]
    why: dict[str, str]


@cache
def lists() -> dict[str, Known]:
    """Return the content of targets.yaml by server."""
    return yaml.safe_load(read_text(Path(__file__).with_name("targets.yaml")))


def refusal(server: str, base: str | None, algorithm: str = "eagle3") -> str | None:
    """Return the reason that a server can't run a head for this target; None if it can or the target isn't found.

    `algorithm` is the head's: "eagle3", "dflash" or "dspark".
    """
    config = base_config(base)
    kind = config and config.model_type
    if server == LLAMA_CPP and base and is_gguf(base) and Path(base).is_file():
        try:
            kind, algorithm = metadata(base).architecture, "gguf"
        except UserError:  # damaged, or without the package that reads it
            kind = None
    known = lists()[server]

    def of_algorithm(texts: dict[str, str]) -> str:
        return " ".join(text for heads, text in texts.items() if algorithm in heads.split())

    if kind is None or (kind in of_algorithm(known.get("runs") or known["refuses"]).split()) is ("runs" in known):
        return None
    return f"gives a head no hidden states of {kind} models: {of_algorithm(known['why'])}"
