"""`python -m speculator inspect`: what a head's folder holds, and where it can go."""

from __future__ import annotations

import argparse
from typing import Any

from speculator.checkpoints import layouts, load, recognise
from speculator.device import dtype_name
from speculator.errors import OneLineParser

HELP = "say what a head's folder holds: architecture, size, base model, layout, and what it can be exported to"


def add_flags(parser: OneLineParser) -> None:
    """The command's flag."""
    parser.add_argument("path", metavar="PATH", help="folder of a head, in any of the layouts")


def run(arguments: argparse.Namespace) -> None:
    """Read every tensor, so that what is said of the folder is so, then print it."""
    layout = recognise(arguments.path)
    head = load(arguments.path, layout)
    config: Any = head.config
    kind = layout.head.__name__.removesuffix("Speculator")
    facts = {
        "layout": f"{layout.name} ({layout.architecture})",
        "architecture": f"{kind}, {config.describe()}",
        "sizes": f"hidden {config.emb_dim}, inner {config.inner_dim}, vocabulary {config.vocab_size}",
        "drafts from": f"{config.output_size} of {config.vocab_size} tokens",
        "parameters": f"{sum(weight.numel() for weight in head.parameters()):,}, {dtype_name(head.dtype)}",
        "base model": config.base_model_name_or_path or "not recorded",
        **({"adapter": config.base_model_adapter} if config.base_model_adapter else {}),
        "fingerprint": config.base_model_fingerprint or "not recorded",
        "trained length": f"{config.trained_length} tokens" if config.trained_length else "not recorded",
        "training data": ", ".join(map(str, config.training_data or [])) or "not recorded",
    }
    for name, fact in facts.items():
        print(f"{name:15} {fact}")
    for other in (other for other in layouts() if other.head is layout.head and other.carries(config)):
        loaders = [server.name for server in other.servers(config, "DIR") if server.loads]
        print(f"{'exports to':15} {other.name}: for {'; '.join(loaders)}")
