"""Draft heads that make a language model generate faster without changing what it says."""

from speculator.custom_generate import speculative
from speculator.decoding.generate import Generation, Step, generate
from speculator.decoding.sampling import Sampling
from speculator.decoding.session import Session
from speculator.drafters import (
    Candidates,
    Chain,
    Drafter,
    FixedTree,
    HeadDrafter,
    ModelDrafter,
    NgramDrafter,
    Paths,
    Tree,
)
from speculator.errors import UserError
from speculator.heads import (
    LSTMSpeculator,
    LSTMSpeculatorConfig,
    MLPSpeculator,
    MLPSpeculatorConfig,
    Speculator,
    load_head,
)
from speculator.target import Target

__all__ = [
    "Candidates",
    "Chain",
    "Drafter",
    "FixedTree",
    "Generation",
    "HeadDrafter",
    "LSTMSpeculator",
    "LSTMSpeculatorConfig",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "ModelDrafter",
    "NgramDrafter",
    "Paths",
    "Sampling",
    "Session",
    "Speculator",
    "Step",
    "Target",
    "Tree",
    "UserError",
    "generate",
    "load_head",
    "speculative",
]
