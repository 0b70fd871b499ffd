"""What SGLang 0.5.23 runs: targets that give a head hidden states, and how it numbers auxiliary layers per target.

Read in the wheel of 0.5.23 (October 2026), not run. A target's class must define `set_eagle3_layers_to_capture` for
EAGLE-3 heads and `set_dflash_layers_to_capture` for block drafters; without it SGLang stops at start. Targets that it
runs through transformers' own code have neither.
"""

from __future__ import annotations

from collections.abc import Callable

from speculator.checkpoints.layout import base_config

NAME = "SGLang 0.5.23"
_BOTH = """
deepseek_v2 deepseek_v3 deepseek_v32 gemma4 gemma4_text gemma4_unified glm4_moe_lite glm5_next glm_moe_dsa gpt_oss
internlm3 iquestcoder kimi_k25 llama llama4 llama4_text mellum minimax_m3_vl ministral3 mistral phi3 qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen4_exp
"""
_EAGLE3 = (
    "apertus exaone_moe gemma3 gemma3_text glm4_moe longcat_flash minimax_m2 qwen2 qwen2_5_vl qwen2_moe shieldgemma2"
)
_BLOCKS = """
beam inkling_mm_model laguna lfm2 lfm2_moe lfm2_vl mimo_v2_flash muse_glimmer muse_spark nemotron_h nemotron_h_omni
"""
TARGETS = {
    "eagle3": {*_BOTH.split(), *_EAGLE3.split()},
    "dflash": {*_BOTH.split(), *_BLOCKS.split()},
    "dspark": {*_BOTH.split(), *_BLOCKS.split(), "deepseek_v4", "kimi_linear"},
}
"""Model types in transformers, by the algorithm of the head."""
HOLDS_K: dict[str, Callable[[list[int], int], bool]] = {
    # deepseek_v2.py and glm4_moe_lite.py, since pull request 25454 of May 2026
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25"),
        lambda ids, layers: ids[0] != 1,
    ),
    # gpt_oss.py, since pull request 32334 of July 2026
    "gpt_oss": lambda ids, layers: max(ids) == layers,
}
"""When the list in `eagle_config` holds k, by model type: a test of the list and the number of the target's layers.

In every other case, and for every other target, it holds k - 1, the layer whose output the state is.
"""


def refusal(base: str | None, algorithm: str) -> str | None:
    """Return the reason that SGLang can't run such a head for this target; None if it can or the target isn't found."""
    config = base_config(base)
    if config is None or config.model_type in TARGETS[algorithm]:
        return None
    hook = "eagle3" if algorithm == "eagle3" else "dflash"
    return f"gives a head no hidden states of {config.model_type} models: no set_{hook}_layers_to_capture"


def read_ids(ids: list[int], base: str | None) -> list[int]:
    """Return auxiliary layers k, given the list in `eagle_config` and the target; one that isn't found has k - 1."""
    config = base_config(base)
    holds_k = HOLDS_K.get(config.model_type) if config else None
    if config and holds_k and holds_k(ids, config.get_text_config().num_hidden_layers):
        return list(ids)
    return [k + 1 for k in ids]


def write_ids(aux_layers: list[int], base: str | None) -> list[int] | None:
    """Return the list for `eagle_config` that SGLang reads as these auxiliary layers; None if there is none."""
    either = ([k - 1 for k in aux_layers], aux_layers)
    return next((ids for ids in either if read_ids(ids, base) == aux_layers), None)


def numberings(ids: list[int], base: str | None) -> list[list[int]]:
    """Return the auxiliary layers that the list in `eagle_config` may stand for: k - 1, or k for some targets."""
    config, outputs = base_config(base), [k + 1 for k in ids]
    return [outputs, ids] if config is None or config.model_type in HOLDS_K else [outputs]
