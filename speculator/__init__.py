"""Draft heads that make a language model generate faster without changing what it says."""

from speculator.decoding.generate import Generation, Step, generate
from speculator.decoding.sampling import Sampling
from speculator.drafters import Drafter, HeadDrafter, NgramDrafter
from speculator.errors import UserError
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig, load_head
from speculator.target import Target

__all__ = [
    "Drafter",
    "Generation",
    "HeadDrafter",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "NgramDrafter",
    "Sampling",
    "Step",
    "Target",
    "UserError",
    "generate",
    "load_head",
]
