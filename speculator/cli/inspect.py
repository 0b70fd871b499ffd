"""`speculator inspect`: describe a head's folder and the layouts it can be exported to."""

from __future__ import annotations

import argparse
from typing import Any

from speculator.checkpoints import head_folder, layouts, load, recognise
from speculator.device import dtype_name


def run(arguments: argparse.Namespace) -> None:
    """Load the head, which checks every tensor, and print its facts."""
    folder = head_folder(arguments.path, arguments.speculator_revision)
    layout = recognise(folder)
    head = load(folder, layout)
    config: Any = head.config
    kind = layout.head.__name__.removesuffix("Speculator")
    facts = {
        "layout": f"{layout.name} ({layout.architecture})",
        "architecture": f"{kind}, {config.describe()}",
        "sizes": f"hidden {config.emb_dim}, inner {config.inner_dim}, vocabulary {config.vocab_size}",
        "draft vocabulary": f"{config.output_size} of {config.vocab_size} tokens",
        "parameters": f"{sum(weight.numel() for weight in head.parameters()):,}, {dtype_name(head.dtype)}",
        "base model": config.base_model_name_or_path or "not recorded",
        **({"adapter": config.base_model_adapter} if config.base_model_adapter else {}),
        "fingerprint": config.base_model_fingerprint or "not recorded",
        "trained length": f"{config.trained_length} tokens" if config.trained_length else "not recorded",
        "training data": ", ".join(map(str, config.training_data or [])) or "not recorded",
    }
    for name, fact in facts.items():
        print(f"{name:16} {fact}")
    for other in (other for other in layouts() if other.head is type(head)):
        if refused := other.refusal(head):
            print(f"{'no export to':16} {other.name}: {refused}")
            continue
        missing, servers = other.needs(config), other.servers(config, "DIR")
        loaders = [server.name for server in servers if server.loads]
        about = f", but only with --base_model: {missing}" if missing else f": for {'; '.join(loaders)}" * bool(loaders)
        print(f"{'exports to':16} {other.name}{about}")
        for server in (server for server in servers if server.loads is False):
            print(f"{'':16} {server.verdict} {server.name}: {server.how}")
