"""What llama.cpp runs: targets whose graphs set the inputs of layers, which a head reads, and options of heads.

The lists are from src/models and conversion of llama.cpp in the sources of llama-cpp-python 0.3.36: a graph serves a
head if it sets `t_layer_inp`. Without it llama-server aborts at the first request.
"""

from __future__ import annotations

from pathlib import Path

from speculator.checkpoints.layout import base_config
from speculator.errors import UserError
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS, AttentionConfig
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
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


def _other_rope(config: AttentionConfig, *runs: str) -> list[str]:
    """Return the name of the head's rope, unless llama.cpp runs it."""
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    return [] if kind in runs else [f"the {kind} rope"]


def lacks_of_eagle3(config: Eagle3SpeculatorConfig) -> list[str]:
    """Return what an EAGLE-3 head has that llama.cpp does not run."""
    flags = ("fc_norm", "norm_output", "qk_norm", "attention_bias", "own_embedding")
    return [
        *(name for name in flags if getattr(config, name)),
        *["sliding_window"] * (config.sliding_window is not None),
        *_other_rope(config, "default", "llama3"),
        *[f"{config.num_aux_layers} auxiliary layers"] * (config.num_aux_layers != DEFAULT_AUX_LAYERS),
    ]


def lacks_of_block(config: DSparkSpeculatorConfig, kind: str) -> list[str]:
    """Return what a block drafter has that llama.cpp does not run; `kind` is "dspark", "dflash" or "dflash2"."""
    top_k = config.selector_top_k if config.selector_rank else 0
    least = top_k * (top_k + 1)
    return [
        *_other_rope(config, "default"),
        *[f"a selector over {top_k} tokens below hidden size {least}"] * (config.emb_dim < least),
        *["a DSpark head of Markov rank 0"] * (kind == "dspark" and not config.markov_rank),
        *["a draft vocabulary of a DFlash head"] * (kind != "dspark" and config.draft_vocab_size is not None),
    ]
