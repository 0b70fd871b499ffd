"""Draft heads, one folder per architecture. Importing this package registers them with transformers' Auto classes."""

from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator
from speculator.heads.lstm.model import LSTMSpeculator, LSTMSpeculatorConfig
from speculator.heads.mlp.model import MLPSpeculator, MLPSpeculatorConfig

ARCHITECTURES: dict[str, type[Speculator]] = {
    "mlp": MLPSpeculator,
    "lstm": LSTMSpeculator,
    "eagle3": Eagle3Speculator,
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
