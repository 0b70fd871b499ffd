"""The layout of DFlash heads that transformers decodes by itself, with `speculation_type="dflash"`.

Its only class for such heads is that of Muse Glimmer's assistant. The class holds no embedding and no output matrix but
takes the target's, so it fits any target. The equations are DFlash's (`speculator.heads.dspark`) under other names.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from speculator.checkpoints import layout
from speculator.checkpoints.block_drafters import SHAPE, common_fields, parts_of, translate
from speculator.checkpoints.eagle3 import ATTENTION, check_heads
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layout import ORIGIN, Layout, Server, base_config
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator

_MODEL_TYPE = "muse_glimmer_assistant"
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}  # ours: theirs
_KEPT = {**layout.KEPT, "mask_token_id": int, "markov_rank": int, "sample_from_anchor": bool, "confidence_head": bool}
del _KEPT["draft_vocab_size"]
# The class has defaults for all fields, which are Muse Glimmer's, and no vocab_size, which only we read.
_FIELDS = (
    *(name for name in ATTENTION if name not in ("emb_dim", "inner_dim", "n_predict")),
    *("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
    *("block_size", "mask_token_id", "target_layer_ids"),
)


def fields(config: DSparkSpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json; raise a UserError for a head that transformers' DFlash class can't run."""
    window = config.sliding_window
    refuse(
        (config.markov_rank, f"transformers has no Markov head, and this head has one of rank {config.markov_rank}"),
        (config.confidence_head, "transformers has no confidence head, and this head has one"),
        (config.sample_from_anchor, "transformers drafts nothing in the anchor's slot, and this head its first token"),
        (config.is_dflash2, f"transformers has no {parts_of(config)}: this is a head of DFlash 2"),
        (config.is_causal, "transformers has no causal blocks, and this head has them"),
        (window is not None, f"transformers counts a sliding window otherwise, and this head has one of {window}"),
    )
    check_heads(config)
    written = common_fields(config, dtype)
    kept = ("dtype", "transformers_version", "hidden_act", *ORIGIN)
    return {
        "architectures": [TRANSFORMERS.architecture],
        "model_type": _MODEL_TYPE,
        # null: the class has defaults that are beyond the vocabulary of most targets
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **{name: written[name] for name in (*_FIELDS, *kept) if name in written},
    }


def from_transformers(read: ForeignConfig, file: Path) -> JsonObject:
    """Convert the content of config.json to the fields of `DSparkSpeculatorConfig`; `file`, its path, is for errors.

    The content differs from that of the `dflash` layout in names only.
    """
    for name in _FIELDS:
        refuse((name not in read, f"{file}: {name} is missing"))
    kind, types = read.get("model_type"), read["layer_types"]
    refuse(
        (kind != _MODEL_TYPE, f"{file}: model_type is {kind!r}; must be {_MODEL_TYPE!r}"),
        ("sliding_attention" in types, f"{file}: layer_types: a sliding window is not supported in this layout"),
    )
    return translate({**read, "model_type": "qwen3", "architectures": ["DFlashDraftModel"], "is_causal": False}, file)


def pack(head: DSparkSpeculator) -> dict[str, Tensor]:
    """Return the head's tensors by the names in transformers' DFlash class."""
    return {_NAMES.get(name, name): tensor for name, tensor in head.state_dict().items()}


def unpack(where: Path, head: DSparkSpeculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names: the inverse of `pack`."""
    ours = {theirs: name for name, theirs in _NAMES.items()}
    return {ours.get(name, name): tensor for name, tensor in tensors.items()}


def servers(config: DSparkSpeculatorConfig, folder: str) -> list[Server]:
    """Return one entry, for transformers: the call that uses the head, or the reason that it can't load it."""
    try:
        fields(config, "float32")
    except UserError as error:
        return [Server("transformers 5.23", False, str(error))]
    base = base_config(config.base_model_name_or_path)
    if base is not None and base.model_type.startswith("gemma"):
        return [Server("transformers 5.23", False, "scales Gemma's embeddings, and the head reads them as stored")]
    how = f"model.generate(..., assistant_model=AutoModel.from_pretrained({json.dumps(folder)}), "
    how += 'speculation_type="dflash")'
    return [Server("transformers 5.23", True, how)]


TRANSFORMERS = Layout(
    name="transformers",
    head=DSparkSpeculator,
    architecture="MuseGlimmerAssistantModel",
    fields=fields,
    servers=servers,
    translate=from_transformers,
    shape=SHAPE,
    kept=_KEPT,
    pack=pack,
    unpack=unpack,
)
