"""How SGLang numbers auxiliary layers in `eagle_config`, which depends on the target's class.

Read in the wheel of 0.5.23 (October 2026), not run.
"""

from __future__ import annotations

from collections.abc import Callable

from speculator.checkpoints.layout import base_config

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
