"""Draft heads, one file per architecture. Importing this package registers them with transformers' Auto classes."""

from speculator.heads.loading import load_head
from speculator.heads.mlp import MLPSpeculator, MLPSpeculatorConfig

__all__ = ["MLPSpeculator", "MLPSpeculatorConfig", "load_head"]
