"""Our own layout: what `MLPSpeculator.save_pretrained` writes."""

from __future__ import annotations

import json
from typing import Any

from speculator.export.layout import Layout, Server
from speculator.heads.mlp import MLPSpeculator, MLPSpeculatorConfig


def fields(config: MLPSpeculatorConfig, dtype: str) -> dict[str, Any]:
    """config.json, as transformers writes it."""
    written = json.loads(config.to_json_string(use_diff=True))
    return {**written, "architectures": [MLPSpeculator.__name__], "dtype": dtype}


def servers(config: MLPSpeculatorConfig, folder: str) -> list[Server]:
    """The bundled decoder, and no server."""
    target = config.base_model_name_or_path or "BASE"
    how = f"python -m speculator generate --target {target} --speculator {folder} --prompt ..."
    return [Server("speculator", True, how)]


NATIVE = Layout(
    name="native",
    architecture=MLPSpeculator.__name__,
    prefix="",
    fields=fields,
    defaults={},
    kept=(
        "base_model_name_or_path",
        "trained_length",
        "training_data",
        "top_k_tokens_per_head",
        "n_candidates",
    ),
    servers=servers,
    expandable=False,
)
