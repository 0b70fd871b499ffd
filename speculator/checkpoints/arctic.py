"""MLP heads for arctic-inference 0.3.0, which patches vLLM 0.26.0: IBM's layout with another architecture."""

from __future__ import annotations

from dataclasses import replace

from speculator.checkpoints import commands
from speculator.checkpoints.ibm import IBM, table
from speculator.checkpoints.layout import Server, base_config
from speculator.checkpoints.table import ABSENT, Key
from speculator.heads.base import SpeculatorConfig


def base_archs(base: str | None) -> list[str]:
    """Return the architectures in the base model's config; none if that is not on this machine."""
    config = base_config(base)
    return list((config and config.architectures) or ())


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """List the versions of arctic-inference, with the command for a head in `folder` or the reason that it fails."""
    options = {"method": "arctic", "model": folder, "num_speculative_tokens": config.n_predict}
    serve = commands.vllm(config.base_model_name_or_path, "ARCTIC_INFERENCE_ENABLED=1", **options)
    how = f"{serve} (as many tokens as heads)"
    return [
        Server("arctic-inference 0.3.0 with vLLM 0.26.0 and CUDA", True, how, ran=False),
        Server("arctic-inference with another vLLM", False, "if enabled, it stops vLLM with a RuntimeError"),
    ]


ARCTIC = replace(
    IBM,
    name="arctic",
    architecture="ArcticMLPSpeculatorPreTrainedModel",
    # arctic-inference checks both, and `architectures` must be a list of exactly one name.
    table=table(
        "arctic", Key(None, "base_model_archs", lambda config: base_archs(config.base_model_name_or_path) or ABSENT)
    ),
    servers=servers,
)
