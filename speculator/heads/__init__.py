"""Draft heads, one file per architecture. Importing this package registers them with transformers' Auto classes."""

from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.loading import load_head
from speculator.heads.lstm import LSTMSpeculator, LSTMSpeculatorConfig
from speculator.heads.mlp import MLPSpeculator, MLPSpeculatorConfig

ARCHITECTURES: dict[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {
    "mlp": (MLPSpeculatorConfig, MLPSpeculator),
    "lstm": (LSTMSpeculatorConfig, LSTMSpeculator),
}

__all__ = [
    "ARCHITECTURES",
    "LSTMSpeculator",
    "LSTMSpeculatorConfig",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "Speculator",
    "SpeculatorConfig",
    "load_head",
]
