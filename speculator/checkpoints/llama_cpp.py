"""Options of heads that llama.cpp does not run, by the sources in llama-cpp-python 0.3.36."""

from __future__ import annotations

from speculator.heads.attention.base import DEFAULT_AUX_LAYERS, AttentionConfig
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig


def _other_rope(config: AttentionConfig, *runs: str) -> list[str]:
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
