"""Draft heads that make a language model generate faster without changing what it says."""

# ruff: noqa: F401  the imports are for type checkers: `__all__` names them
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculator.checkpoints.loading import load_head
    from speculator.custom_generate import speculative
    from speculator.draft import Draft
    from speculator.drafters import (
        Candidates,
        Chain,
        Drafter,
        EarlyExitDrafter,
        FixedTree,
        HeadDrafter,
        MixedDrafter,
        ModelDrafter,
        NgramDrafter,
        Paths,
        Tree,
    )
    from speculator.engine import Engine, generate
    from speculator.errors import UserError
    from speculator.heads import (
        LSTMSpeculator,
        LSTMSpeculatorConfig,
        MLPSpeculator,
        MLPSpeculatorConfig,
        Speculator,
    )
    from speculator.request import Generation, Request, Step
    from speculator.sampling import Sampling
    from speculator.target import Target
    from speculator.tuned import tuned_drafter

# A name is imported when it is first asked for: torch and transformers take seconds, which `--help` need not wait for.
_HOMES = {
    "checkpoints.loading": ["load_head"],
    "custom_generate": ["speculative"],
    "draft": ["Draft"],
    "drafters": [
        "Candidates",
        "Chain",
        "Drafter",
        "EarlyExitDrafter",
        "FixedTree",
        "HeadDrafter",
        "MixedDrafter",
        "ModelDrafter",
        "NgramDrafter",
        "Paths",
        "Tree",
    ],
    "tuned": ["tuned_drafter"],
    "engine": ["Engine", "generate"],
    "errors": ["UserError"],
    "heads": [
        "LSTMSpeculator",
        "LSTMSpeculatorConfig",
        "MLPSpeculator",
        "MLPSpeculatorConfig",
        "Speculator",
    ],
    "request": ["Generation", "Request", "Step"],
    "sampling": ["Sampling"],
    "target": ["Target"],
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"speculator.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'speculator' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
