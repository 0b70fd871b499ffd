"""Draft heads, one file per architecture. Importing this package registers them with transformers' Auto classes."""

from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.eagle3 import Eagle3Speculator
from speculator.heads.eagle3_config import Eagle3SpeculatorConfig
from speculator.heads.lstm import LSTMSpeculator, LSTMSpeculatorConfig
from speculator.heads.mlp import MLPSpeculator, MLPSpeculatorConfig

ARCHITECTURES: dict[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {
    "mlp": (MLPSpeculatorConfig, MLPSpeculator),
    "lstm": (LSTMSpeculatorConfig, LSTMSpeculator),
}

__all__ = [
    "ARCHITECTURES",
    "Eagle3Speculator",
    "Eagle3SpeculatorConfig",
    "LSTMSpeculator",
    "LSTMSpeculatorConfig",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "Speculator",
    "SpeculatorConfig",
]
