"""The layout of DFlash heads that transformers decodes by itself, with `speculation_type="dflash"`.

Its only class for such heads is that of Muse Glimmer's assistant. The class holds no embedding and no output matrix but
takes the target's, so it fits any target. The equations are DFlash's (`speculator.heads.dspark`) under other names.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from speculator.checkpoints import block_drafters
from speculator.checkpoints.block_drafters import ALL_LAYERS, BLOCK, NO_EMBEDDING, SLOTS, no_dflash2, no_dspark
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layers import FULL_HEADS, VERSION
from speculator.checkpoints.layout import ORIGIN, Layout, Server, base_config, whole_vocabulary
from speculator.checkpoints.table import DTYPE, Key, Table, constant, keys, only, same, to_json
from speculator.errors import UserError, refuse
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator

_MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}  # ours: theirs
_LAYER = {row.theirs: row for row in ALL_LAYERS}
TABLE: Table = (
    whole_vocabulary("transformers"),
    *no_dspark("transformers", "its first token"),
    *no_dflash2("transformers", "this is a head of DFlash 2"),
    only("is_causal", False, "transformers has no causal blocks, and this head has them"),
    only(
        "sliding_window",
        None,
        "transformers counts a sliding window otherwise, and this head has one of {0.sliding_window}",
    ),
    FULL_HEADS,
    NO_EMBEDDING,
    constant("model_type", _MODEL_TYPE),
    # null: the class has defaults that are beyond the vocabulary of most targets
    *(constant(name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")),
    *same("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *same("rms_norm_eps", "rope_parameters", "max_position_embeddings"),
    *(_LAYER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types")),
    SLOTS,
    *same("mask_token_id"),
    BLOCK[0],
    Key(DTYPE, "dtype"),
    VERSION,
    _LAYER["hidden_act"],
    *ORIGIN,
)
# The class has defaults for all keys of a head, which are Muse Glimmer's, and no vocab_size, which only we read.
_NEEDED = (*(row.theirs for row in keys(TABLE) if row.ours not in (None, DTYPE) and not row.optional), "layer_types")


def canonical(read: ForeignConfig, file: Path) -> ForeignConfig:
    """Return the content of config.json with the keys of the `dflash` layout; its path `file` is for errors."""
    missing = next((name for name in _NEEDED if name not in read), None)
    refuse((missing, f"{file}: {missing} is missing"))
    kind, types = read.get("model_type"), read["layer_types"]
    refuse(
        (kind != _MODEL_TYPE, f"{file}: model_type is {kind!r}; must be {_MODEL_TYPE!r}"),
        ("sliding_attention" in types, f"{file}: layer_types: a sliding window is not supported in this layout"),
    )
    changed = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "is_causal": False}
    return block_drafters.canonical({**read, **changed}, file)


def pack(head: DSparkSpeculator) -> dict[str, Tensor]:
    return {_NAMES.get(name, name): tensor for name, tensor in head.state_dict().items()}


def unpack(where: Path, head: DSparkSpeculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names: the inverse of `pack`."""
    ours = {theirs: name for name, theirs in _NAMES.items()}
    return {ours.get(name, name): tensor for name, tensor in tensors.items()}


def servers(config: DSparkSpeculatorConfig, folder: str) -> list[Server]:
    """Return one entry, for transformers: the call that uses the head, or the reason that it can't load it."""
    refused, base = None, base_config(config.base_model_name_or_path)
    try:
        to_json(TABLE, config, "float32")
        if base is not None and base.model_type.startswith("gemma"):
            refused = "scales Gemma's embeddings, and the head reads them as stored"
    except UserError as error:
        refused = str(error)
    head = f"AutoModel.from_pretrained({json.dumps(folder)})"
    how = f'model.generate(..., assistant_model={head}, speculation_type="dflash")'
    return [Server.of("transformers 5.23", refused, how)]


TRANSFORMERS = Layout(
    name="transformers",
    head=DSparkSpeculator,
    architecture="MuseGlimmerAssistantModel",
    table=TABLE,
    servers=servers,
    canonical=canonical,
    pack=pack,
    unpack=unpack,
)
