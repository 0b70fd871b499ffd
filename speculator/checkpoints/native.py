"""Our own layouts, one for each kind of head: what `save_pretrained` writes."""

from __future__ import annotations

import json
from typing import Any

from speculator.checkpoints import eagle3
from speculator.checkpoints.layout import KEPT, SHAPE, Layout, Server
from speculator.heads import ARCHITECTURES, Eagle3Speculator
from speculator.heads.base import Speculator, SpeculatorConfig


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """The bundled decoder, and no server."""
    target = config.base_model_name_or_path or "BASE"
    how = f"python -m speculator generate --target {target} --speculator {folder} --prompt ..."
    return [Server("speculator", True, how)]


def _layout(head: type[Speculator], shape: dict[str, type] = SHAPE, kept: dict[str, type] = KEPT) -> Layout:
    def fields(config: SpeculatorConfig, dtype: str) -> dict[str, Any]:
        """config.json, as transformers writes it."""
        written = json.loads(config.to_json_string(use_diff=True))
        return {**written, "architectures": [head.__name__], "dtype": dtype}

    return Layout(
        name="native",
        head=head,
        architecture=head.__name__,
        fields=fields,
        servers=servers,
        shape=shape,
        kept=kept,
    )


NATIVE = tuple(
    _layout(head, eagle3.SHAPE, eagle3.KEPT) if head is Eagle3Speculator else _layout(head)
    for _, head in ARCHITECTURES.values()
)
