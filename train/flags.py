"""Flags of `speculator adapt`."""

from __future__ import annotations

import shlex
from pathlib import Path

from speculator.cli.shared_flags import MANY, add_revision
from speculator.errors import OneLineParser
from train.options.config import ROOT


def adapt(parser: OneLineParser) -> None:
    """Train a head on the server's recorded answers, load it into the server if it is faster, and repeat."""
    parser.add_argument("--server", metavar="URL", help="server to load new heads into (default: load them nowhere)")
    parser.add_argument(
        "--record",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="folder that the server records to, or one of .jsonl files of chats, the oldest first by name",
    )
    parser.add_argument("--speculator", required=True, help="folder or hub id of the head that the server started with")
    add_revision(parser)
    parser.add_argument("--target", help="hub id, folder or GGUF file of the target (default: as recorded)")
    parser.add_argument("--output", type=Path, default=Path("runs/adapt"), help="folder to write (default: runs/adapt)")
    parser.add_argument(
        "--config",
        type=Path,
        default=ROOT / "configs" / "continue.yaml",
        help="settings of train.py (default: configs/continue.yaml)",
    )
    parser.add_argument(
        "--mix",
        **MANY,
        default=[],
        metavar="SOURCE@WEIGHT",
        help="another source to train on, such as self@0.25; the recorded answers have the weight 1",
    )
    parser.add_argument(
        "--gate_flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="flags of `speculator eval gate`, such as '--guard python-sources'",
    )
    parser.add_argument(
        "--every_tokens",
        type=int,
        default=200_000,
        help="recorded answer tokens since the last round that start a round (default: 200000)",
    )
    parser.add_argument(
        "--every_minutes",
        type=float,
        help="minutes after which fewer tokens, of at least 200 answers, start a round too (default: never)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="number of rounds in all, earlier calls' included, after which to stop (default: no end)",
    )
    parser.add_argument("--api_key", help="key of the server (default: $SPECULATOR_API_KEY)")
    parser.add_argument(
        "--layout",
        choices=("eagle3", "dflash", "dflash2"),
        help="--server is a vLLM that reads heads in this layout; its drafter's weights are updated, and taken back if "
        "its acceptance falls",
    )
