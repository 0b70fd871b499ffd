"""MLP heads for arctic-inference 0.3.0, which patches vLLM 0.26.0: IBM's layout with another architecture."""

from __future__ import annotations

from dataclasses import replace

from speculator.checkpoints import commands
from speculator.checkpoints.ibm import IBM
from speculator.checkpoints.layout import Server, base_config
from speculator.files import JsonObject
from speculator.heads.base import SpeculatorConfig


def fields(config: SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json: that of the `ibm` layout, with `architectures` and `base_model_archs` changed.

    arctic-inference checks both. `architectures` must be a list of exactly one name.
    """
    return {**IBM.fields(config, dtype), "architectures": [ARCTIC.architecture], **base_archs(config)}


def base_archs(config: SpeculatorConfig) -> dict[str, list[str]]:
    """Return {"base_model_archs": names} for config.json, or {} if the base model's config is not on this machine."""
    base = base_config(config.base_model_name_or_path)
    archs = base and base.architectures
    return {"base_model_archs": list(archs)} if archs else {}


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """List the versions of arctic-inference, with the command for a head in `folder` or the reason that it fails."""
    options = {"method": "arctic", "model": folder, "num_speculative_tokens": config.n_predict}
    serve = commands.vllm(config.base_model_name_or_path, "ARCTIC_INFERENCE_ENABLED=1", **options)
    how = f"{serve} (as many tokens as heads)"
    return [
        Server("arctic-inference 0.3.0 with vLLM 0.26.0 and CUDA", True, how),
        Server("arctic-inference with another vLLM", False, "if enabled, it stops vLLM with a RuntimeError"),
    ]


ARCTIC = replace(IBM, name="arctic", architecture="ArcticMLPSpeculatorPreTrainedModel", fields=fields, servers=servers)
