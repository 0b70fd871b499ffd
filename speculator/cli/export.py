"""`python -m speculator export`: a trained head in the layout that a server reads, and back."""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path
from typing import Any

from speculator.checkpoints import FORMATS, layout_of, load_any, save
from speculator.checkpoints.card import NAME, write_card
from speculator.checkpoints.layout import DTYPES, base_config
from speculator.device import dtype_name
from speculator.drafters.tuned import TUNED
from speculator.errors import OneLineParser, UserError, refuse
from speculator.heads.base import SpeculatorConfig

HELP = "write a head in a server's checkpoint layout, or a server's head in ours; says who loads it and how"


def add_flags(parser: OneLineParser) -> None:
    """The command's flags."""
    parser.add_argument("--speculator", required=True, type=Path, help="folder of a head, in any of the layouts")
    parser.add_argument("--format", required=True, choices=FORMATS, help="the layout to write")
    parser.add_argument("--output", required=True, type=Path, help="folder to write; must not be there, or be empty")
    expand = "write tied tensors under every head's name, for loaders that do not tie"
    parser.add_argument("--expand-tied", "--expand_tied", action="store_true", help=expand)
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: as it is stored; published ones are float16")
    parser.add_argument("--base_model", help="hub id or folder of the target; default: the one that is recorded")


def run(arguments: argparse.Namespace) -> None:
    """Export, then say which servers load the result."""
    head: Any = load_any(arguments.speculator)
    layout = layout_of(arguments.format, head)
    if arguments.base_model:
        head.config.base_model_name_or_path = arguments.base_model
    if arguments.dtype:
        head.to(DTYPES[arguments.dtype])
    checked = check_base(head.config)
    save(head, arguments.output, layout, arguments.expand_tied)
    carry_card(arguments.speculator, arguments.output)
    if layout.name == "native" and (arguments.speculator / TUNED).is_file():
        shutil.copyfile(arguments.speculator / TUNED, arguments.output / TUNED)
    dtype = dtype_name(head.dtype)
    print(f"{arguments.output}: {layout.name} ({layout.architecture}), {dtype}")
    print("read back: config, tensors, weights and logits are the head's")
    if dtype == "float32" and layout.name != "native":
        print(
            "published heads are float16: --dtype float16 or bfloat16 halves the file, and its logits are then rounded"
        )
    print(checked)
    for server in layout.servers(head.config, shlex.quote(str(arguments.output))):
        print(f"{'loads' if server.loads else 'DOES NOT LOAD'} in {server.name}: {server.how}")


def carry_card(source: Path, output: Path) -> None:
    """The head's model card goes along; a head without one gets one."""
    if (source / NAME).is_file():
        shutil.copyfile(source / NAME, output / NAME)
    else:
        write_card(output, run=source.resolve().parent)


def check_base(config: SpeculatorConfig) -> str:
    """Compare the head with its base model, if that is on this machine; gives what to tell the user.

    Raises:
        UserError: another vocabulary or hidden size: servers check neither before they draft.
    """
    name = config.base_model_name_or_path
    base = base_config(name)
    if name is None:
        return "base model: none recorded, so not checked against; --base_model names it"
    if base is None:
        if Path(name).is_dir():
            raise UserError(f"{name}: no base model there that transformers knows")
        return f"base model: {name}, not on this machine, so vocabulary and hidden size were not checked"
    vocab, hidden = getattr(base, "vocab_size", None), getattr(base, "hidden_size", None)
    ours, read = config.vocab_size, config.emb_dim
    refuse(
        (vocab != ours, f"the head is for a vocabulary of {ours} tokens, but {name} has {vocab}"),
        (hidden != read, f"the head reads hidden states of size {read}, but {name} has {hidden}"),
    )
    return f"base model: {name}, same vocabulary and hidden size"
