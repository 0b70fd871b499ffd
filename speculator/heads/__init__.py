"""Draft heads, one file per architecture. Importing this package registers them with transformers' Auto classes."""

from speculator.heads.attention import AttentionHead
from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator
from speculator.heads.lstm.model import LSTMSpeculator, LSTMSpeculatorConfig
from speculator.heads.mlp.model import MLPSpeculator, MLPSpeculatorConfig
from speculator.heads.recurrent import RecurrentHead

ARCHITECTURES: dict[str, tuple[type[SpeculatorConfig], type[Speculator]]] = {
    "mlp": (MLPSpeculatorConfig, MLPSpeculator),
    "lstm": (LSTMSpeculatorConfig, LSTMSpeculator),
    "eagle3": (Eagle3SpeculatorConfig, Eagle3Speculator),
}

__all__ = [
    "ARCHITECTURES",
    "AttentionHead",
    "Eagle3Speculator",
    "Eagle3SpeculatorConfig",
    "LSTMSpeculator",
    "LSTMSpeculatorConfig",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "RecurrentHead",
    "Speculator",
    "SpeculatorConfig",
]
