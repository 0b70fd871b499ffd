"""Draft heads and lossless speculative decoding for causal language models."""

# ruff: noqa: F401  the imports are for type checkers: `__all__` names them
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculator.checkpoints.loading import load_drafter, load_head
    from speculator.custom_generate import speculative
    from speculator.decoding.draft import Draft
    from speculator.decoding.engine import Engine, generate
    from speculator.decoding.request import Generation, Request, Step
    from speculator.decoding.sampling import Sampling
    from speculator.drafters import (
        Candidates,
        Chain,
        Drafter,
        DraftModelDrafter,
        FixedTree,
        HeadDrafter,
        NgramDrafter,
        Tree,
    )
    from speculator.errors import UserError
    from speculator.heads import (
        DSparkSpeculator,
        DSparkSpeculatorConfig,
        Eagle3Speculator,
        Eagle3SpeculatorConfig,
        MLPSpeculator,
        MLPSpeculatorConfig,
        Speculator,
    )
    from speculator.target.model import Target

# Names are imported at first use: importing torch and transformers takes seconds, which would delay `--help`.
_MODULES = {
    "checkpoints.loading": ["load_drafter", "load_head"],
    "custom_generate": ["speculative"],
    "decoding.draft": ["Draft"],
    "drafters": [
        "Candidates",
        "Chain",
        "Drafter",
        "FixedTree",
        "HeadDrafter",
        "DraftModelDrafter",
        "NgramDrafter",
        "Tree",
    ],
    "decoding.engine": ["Engine", "generate"],
    "errors": ["UserError"],
    "heads": [
        "DSparkSpeculator",
        "DSparkSpeculatorConfig",
        "Eagle3Speculator",
        "Eagle3SpeculatorConfig",
        "MLPSpeculator",
        "MLPSpeculatorConfig",
        "Speculator",
    ],
    "decoding.request": ["Generation", "Request", "Step"],
    "decoding.sampling": ["Sampling"],
    "target.model": ["Target"],
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(import_module(f"speculator.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'speculator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
