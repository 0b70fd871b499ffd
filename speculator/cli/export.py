"""`speculator export`: write a trained head in a server's layout, and the reverse."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from speculator.checkpoints import head_folder, layout_of, load_any, save
from speculator.checkpoints.base_model import same_embedding
from speculator.checkpoints.card import NAME, copy_card, read_run, write_card
from speculator.checkpoints.files import CONFIG
from speculator.checkpoints.layout import DTYPES, base_config
from speculator.checkpoints.mtp import MTP
from speculator.device import dtype_name
from speculator.drafters.tuning import TUNED
from speculator.errors import refuse
from speculator.files import read_json
from speculator.heads.base import SpeculatorConfig


def run(arguments: argparse.Namespace) -> None:
    """Export the head, then print which servers load it."""
    folder = head_folder(arguments.speculator, arguments.speculator_revision)
    head: Any = load_any(folder)
    layout = layout_of(arguments.format, head)
    recorded = head.config.base_model_name_or_path
    if recorded == str(folder) and not arguments.speculator_revision:  # MTP layers of a hub id: not the cache's folder
        head.config.base_model_name_or_path = arguments.speculator
    if arguments.base_model:
        head.config.base_model_name_or_path = arguments.base_model
    refuse((arguments.dtype and layout is MTP, "--dtype: the layers have the dtype of the base model's files"))
    if arguments.dtype:
        head.to(DTYPES[arguments.dtype])
    base = check_base(head.config)
    card = folder / NAME
    # A damaged record is refused before anything is written.
    record = None if card.is_file() else read_run(folder.resolve().parent)
    stored = save(head, arguments.output, layout, arguments.expand_tied)
    if (arguments.output / NAME).exists():  # the target's own, and the same file as in its folder
        pass
    elif record is None:
        copy_card(card, arguments.output / NAME, arguments.base_model and (recorded, arguments.base_model), stored)
    elif layout.write is None:  # a card is made from the folder
        write_card(arguments.output, record)
    if layout.name == "native" and (folder / TUNED).is_file():
        shutil.copyfile(folder / TUNED, arguments.output / TUNED)
    dtype = dtype_name(head.dtype)
    print(f"{arguments.output}: {layout.name} ({layout.architecture}), {dtype}")
    print(base)
    if adapter := head.config.base_model_adapter:
        print(f"trained for the adapter {adapter}: serve it too, unless it is merged into the base model")
    for server in layout.servers(head.config, str(arguments.output)):
        print(f"{server.verdict} {server.name}: {server.how}")


def check_base(config: SpeculatorConfig) -> str:
    """Return a line to print about the base model; raise a UserError if its vocabulary or hidden size does not fit.

    Servers compare neither before they draft. A base model that is not on this machine is not checked.
    """
    name = config.base_model_name_or_path
    if name is None:
        return "base model: none recorded; --base_model names it"
    base = base_config(name)
    if base is None:
        file = Path(name) / CONFIG
        own_code = file.is_file() and "auto_map" in read_json(file)
        fault = "not the folder of a model that transformers can read"
        refuse((Path(name).is_dir() and not own_code, f"{name}: {fault}"))
        why = "which comes with code of its own" if own_code else "not on this machine"
        return f"base model: {name}, {why}, so its sizes were not checked"
    text = base.get_text_config()
    vocab, hidden = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)
    refuse(
        (vocab is None or hidden is None, f"{name}: its config.json has no vocab_size or no hidden_size"),
        (vocab != config.vocab_size, f"the head has a vocabulary of {config.vocab_size} tokens; {name} has {vocab}"),
        (hidden != config.emb_dim, f"the head reads hidden states of size {config.emb_dim}; {name} has {hidden}"),
    )
    if same_embedding(config) is False:
        other = "not the weights that the head was trained for: fewer drafts may be accepted"
        return f"base model: {name}, of the same sizes, but {other}"
    return f"base model: {name}, of the same sizes"
