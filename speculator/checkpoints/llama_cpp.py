"""Targets for which llama.cpp can run a draft head: those whose graphs set the inputs of layers, which a head reads.

The lists are from src/models and conversion of llama.cpp in the sources of llama-cpp-python 0.3.36: a graph serves a
head if it sets `t_layer_inp`. Without it llama-server aborts at the first request.
"""

from __future__ import annotations

from pathlib import Path

from speculator.checkpoints.layout import base_config
from speculator.errors import UserError
from speculator.target.gguf.file import is_gguf, metadata

NAME = "llama.cpp 0.5"
ARCHITECTURES = {
    *("llama", "llama-embed", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gemma4", "gpt-oss"),
    *("lfm2", "lfm2moe", "minimax-01", "minimax-m2", "mimo2", "nemotron_h", "nemotron_h_moe", "deepseek4"),
    *("bailingmoe3", "hunyuan-dense", "hunyuan_vl", "nanbeige", "muse-glimmer"),
}
"""Architectures of GGUF files."""
MODEL_TYPES = {
    *("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"),
    *(
        "qwen3_5_moe_text",
        "gemma4",
        "gemma4_text",
        "gpt_oss",
        "lfm2",
        "lfm2_moe",
        "minimax",
        "minimax_m2",
        "nemotron_h",
    ),
    *("deepseek_v4", "hunyuan_v1_dense", "muse_glimmer"),
}
"""Model types of transformers whose files llama.cpp's converter gives one of these architectures."""


def refusal(base: str | None) -> str | None:
    """Return the reason that llama.cpp can't run a head for this target; None if it can or the target isn't found."""
    if base and is_gguf(base) and Path(base).is_file():
        try:
            found, known = metadata(base).architecture, ARCHITECTURES
        except UserError:  # damaged, or without the package that reads it
            return None
    elif config := base_config(base):
        found, known = config.model_type, MODEL_TYPES
    else:
        return None
    if found in known:
        return None
    return f"gives a head no hidden states of {found} models: llama-server aborts at the first request (t_layer_inp)"
