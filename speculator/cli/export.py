"""`speculator export`: write a trained head in a server's layout, and the reverse."""

from __future__ import annotations

import argparse
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from speculator.checkpoints import head_folder, layout_of, load_any, save
from speculator.checkpoints.base_model import same_matrices
from speculator.checkpoints.card import NAME, copy_card, read_run, write_card
from speculator.checkpoints.files import CONFIG
from speculator.checkpoints.hub import is_hub_id
from speculator.checkpoints.layout import DTYPES, base_config, base_in
from speculator.checkpoints.mtp import MTP
from speculator.device import dtype_name
from speculator.drafters.tuning import TUNED
from speculator.errors import first_line, refuse
from speculator.files import read_json
from speculator.heads.base import SpeculatorConfig
from speculator.target.loading import causal


def run(arguments: argparse.Namespace) -> None:
    """Export the head, then print which servers load it."""
    folder = head_folder(arguments.speculator, arguments.speculator_revision)
    head: Any = load_any(folder)
    layout = layout_of(arguments.format, head)
    recorded, base_folder = head.config.base_model_name_or_path, arguments.base_model
    # MTP layers of a hub id: not the cache's folder, unless the model of that revision is copied.
    if recorded == str(folder) and not (layout is MTP and arguments.speculator_revision):
        head.config.base_model_name_or_path = arguments.speculator
    if base_folder:
        head.config.base_model_name_or_path = base_folder
    refuse((arguments.dtype and layout is MTP, "--dtype: the layers have the dtype of the base model's files"))
    if arguments.dtype:
        head.to(DTYPES[arguments.dtype])
    base, same = check_base(head.config)
    # A folder of the recorded model only says where its matrices are, unless the layout is a copy of the folder.
    kept = recorded if base_folder and recorded and same and is_hub_id(recorded) and layout.write is None else None
    if kept:
        head.config.base_model_name_or_path = kept
    card = folder / NAME
    # A damaged record is refused before anything is written.
    record = None if card.is_file() else read_run(folder.resolve().parent)
    with base_in(kept, base_folder) if kept else nullcontext():
        stored = save(head, arguments.output, layout)
        servers = layout.servers(head.config, str(arguments.output))
    if (arguments.output / NAME).exists():  # the target's own, and the same file as in its folder
        pass
    elif record is None:
        copy_card(card, arguments.output / NAME, (recorded, base_folder) if base_folder and not kept else None, stored)
    elif layout.write is None:  # a card is made from the folder
        write_card(arguments.output, record)
    if layout.name == "native" and (folder / TUNED).is_file():
        shutil.copyfile(folder / TUNED, arguments.output / TUNED)
    dtype = dtype_name(head.dtype)
    print(f"{arguments.output}: {layout.name} ({layout.architecture}), {dtype}")
    print(base)
    if adapter := head.config.base_model_adapter:
        print(f"trained for the adapter {adapter}: serve it too, unless it is merged into the base model")
    for server in servers:
        print(f"{server.verdict} {server.name}: {server.how}")


def check_base(config: SpeculatorConfig) -> tuple[str, bool | None]:
    """Return a line to print about the base model, and `same_matrices`.

    Servers compare neither before they draft. A base model that is not on this machine is not checked. Raises a
    UserError if its vocabulary or hidden size does not fit.
    """
    name = config.base_model_name_or_path
    if name is None:
        return "base model: none recorded; --base_model names it", None
    base = base_config(name)
    if base is None:
        file = Path(name) / CONFIG
        own_code = file.is_file() and "auto_map" in read_json(file)
        fault = "not the folder of a model that transformers can read"
        refuse((Path(name).is_dir() and not own_code, f"{name}: {fault}"))
        why = "which comes with code of its own" if own_code else "not on this machine"
        return f"base model: {name}, {why}, so its sizes were not checked", None
    text = causal(base, name).get_text_config()
    vocab, hidden = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)
    refuse(
        (vocab is None or hidden is None, f"{name}: its config.json has no vocab_size or no hidden_size"),
        (vocab != config.vocab_size, f"the head has a vocabulary of {config.vocab_size} tokens; {name} has {vocab}"),
        (hidden != config.emb_dim, f"the head reads hidden states of size {config.emb_dim}; {name} has {hidden}"),
    )
    try:
        same = same_matrices(config)
    except Exception as error:  # a layout that stores a matrix raises it again
        return f"base model: {name}, of the same sizes; weights not compared: {first_line(error)}", None
    other = ", but not the weights that the head was trained for: fewer drafts may be accepted"
    return f"base model: {name}, of the same sizes{other if same is False else ''}", same
