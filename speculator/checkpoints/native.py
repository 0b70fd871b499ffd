"""This library's own layouts, one per kind of head, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from functools import cache

from speculator.checkpoints.commands import BASE, line
from speculator.checkpoints.eagle3 import FLAGS
from speculator.checkpoints.layout import Layout, Server, declared_fields
from speculator.checkpoints.table import Key
from speculator.files import JsonObject
from speculator.heads.base import Speculator, SpeculatorConfig

_NEEDED = {
    *("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"),
    *("max_position_embeddings", "attention_bias", "qk_norm", *FLAGS),
}
"""Fields that change a head's shape or its drafts: config.json must have them."""


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """Return one entry, for the bundled decoder, with its command for a head in `folder`."""
    adapter = ("--adapter", config.base_model_adapter) if config.base_model_adapter else ()
    words = ("speculator", "generate", "--target", BASE, *adapter, "--speculator", folder, "--prompt", "...")
    return [Server("speculator", True, line(config.base_model_name_or_path, *words))]


@cache
def native_layout(head: type[Speculator]) -> Layout:
    """Return the `native` layout of a head class: the config and tensors that `save_pretrained` writes."""

    def written(config: SpeculatorConfig, dtype: str) -> JsonObject:
        return {**json.loads(config.to_json_string(use_diff=True)), "architectures": [head.__name__], "dtype": dtype}

    names = [*declared_fields(head.config_class), "top_k_tokens_per_head", "n_candidates"]
    return Layout(
        name="native",
        head=head,
        architecture=head.__name__,
        table=tuple(Key(name, name, optional=name not in _NEEDED) for name in names),
        servers=servers,
        written=written,
    )
