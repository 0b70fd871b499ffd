"""Draft heads, one folder per architecture. Importing this package registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel

from speculator.heads.base import Speculator, SpeculatorConfig
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator
from speculator.heads.mlp.model import MLPSpeculator, MLPSpeculatorConfig
from speculator.heads.mtp.config import MTPSpeculatorConfig
from speculator.heads.mtp.model import MTPSpeculator

ARCHITECTURES: dict[str, type[Speculator]] = {}


def register(name: str, head: type[Speculator]) -> None:
    """Add an architecture under the name that users give as `speculator.architecture`."""
    ARCHITECTURES[name] = head
    AutoConfig.register(head.config_class.model_type, head.config_class, exist_ok=True)
    AutoModel.register(head.config_class, head, exist_ok=True)


register("mlp", MLPSpeculator)
register("eagle3", Eagle3Speculator)
register("dspark", DSparkSpeculator)
register("mtp", MTPSpeculator)

__all__ = [
    "ARCHITECTURES",
    "DSparkSpeculator",
    "DSparkSpeculatorConfig",
    "Eagle3Speculator",
    "Eagle3SpeculatorConfig",
    "MLPSpeculator",
    "MLPSpeculatorConfig",
    "MTPSpeculator",
    "MTPSpeculatorConfig",
    "Speculator",
    "SpeculatorConfig",
    "register",
]
