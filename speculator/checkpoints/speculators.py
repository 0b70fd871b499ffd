"""The layout of the `speculators` library (0.9.0), which vLLM also reads.

It always stores the target's embedding: the library silently uses zeros if that is missing. A head that shares its
target's embedding is therefore written with a copy from the base model's files. When read, an embedding is the head's
own only if `embed_requires_grad` says that it was trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from torch import Tensor

from speculator.checkpoints.arctic import base_archs
from speculator.checkpoints.base_model import base_matrix
from speculator.checkpoints.eagle3 import (
    AUX_LAYERS,
    EMBEDDING,
    FLAGS,
    KEPT,
    SHAPE,
    draft_vocab_size,
    from_d2t,
    from_llama,
    llama,
    other_lists,
    vllm_server,
    with_d2t,
)
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layout import ORIGIN, Layout, Server, origin
from speculator.errors import refuse
from speculator.files import JsonObject
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS
from speculator.heads.base import SpeculatorConfig
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator

VERSION = "0.9.0"


def fields(config: Eagle3SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json. No field is left out, because readers have different defaults, or none."""
    layer = llama(config)
    if config.num_aux_layers != DEFAULT_AUX_LAYERS:
        layer["num_aux_hidden_states"] = config.num_aux_layers  # vLLM does not count the list in this layout
    return {
        "architectures": [SPECULATORS.architecture],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        "draft_vocab_size": config.output_size,
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": config.own_embedding,
        "target_hidden_size": None,
        AUX_LAYERS: config.aux_layers,
        "speculators_config": method(config, "eagle3"),
        "transformer_layer_config": layer,
        **origin(config),
    }


def method(config: SpeculatorConfig, algorithm: str) -> JsonObject:
    """Return the field `speculators_config` of config.json: how to draft, and for which target."""
    proposal: JsonObject = {"proposal_type": "greedy", "speculative_tokens": config.n_predict}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {
            "name_or_path": config.base_model_name_or_path,
            "architectures": base_archs(config).get("base_model_archs", []),
        },
    }


def translate(read: ForeignConfig, file: Path) -> JsonObject:
    """Convert the content of config.json to the fields of `Eagle3SpeculatorConfig`; `file`, its path, is for errors."""
    kind = read.get("speculators_model_type")
    refuse(
        (kind != "eagle3", f"{file}: speculators_model_type is {kind!r}; must be 'eagle3'"),
        (
            "norm_before_residual" not in read,
            f"{file}: norm_before_residual is missing; vLLM assumes true, and speculators false",
        ),
    )
    refuse(*other_lists(read, file))
    layer, about = read["transformer_layer_config"], read["speculators_config"]
    steps = about["proposal_methods"][0]["speculative_tokens"]
    base = about["verifier"]["name_or_path"]
    shape = from_llama({**layer, "target_hidden_size": read.get("target_hidden_size")}, file)
    return {
        **shape,
        **{name: read.get(name, False) for name in FLAGS},
        "n_predict": steps,
        "draft_vocab_size": draft_vocab_size(read.get("draft_vocab_size", 32000), shape["vocab_size"]),
        "aux_layers": read.get(AUX_LAYERS),
        "own_embedding": read.get("embed_requires_grad", False),
        **{name: read.get(name) for name in ORIGIN},
        "base_model_name_or_path": base,
    }


def pack(head: Eagle3Speculator) -> dict[str, Tensor]:
    """Return the tensors to store: the head's, and the embedding, read from the target's files if the head has none."""
    weight = head.embedding_weight
    if weight is None:
        weight = base_matrix(head.config, "embedding")
    return {**with_d2t(head), EMBEDDING: weight.to(head.device, head.dtype)}


def unpack(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names, without the copy of the target's embedding.

    The head embeds tokens with that copy until `bind` replaces it with the target's own. A copy of zeros means that
    none was stored, so it is dropped. The embedding of a head that has its own (`own_embedding`) is returned too.

    Args:
        where: the folder, for errors.
    """
    tensors, config = from_d2t(where, head, tensors), head.config
    if not config.own_embedding and EMBEDDING in tensors:
        weight = tensors.pop(EMBEDDING)
        shape = (config.vocab_size, config.emb_dim)
        refuse(
            (weight.shape != shape, f"{where}: {EMBEDDING} is {list(weight.shape)}, config.json says {list(shape)}"),
            (not weight.isfinite().all(), f"{where}: {EMBEDDING} has values that are not finite"),
        )
        # Zeros are what the library has where no embedding was stored: then the target's own is shared.
        if weight.any():
            head.share_embedding(weight)
    return tensors


def servers(config: Eagle3SpeculatorConfig, folder: str) -> list[Server]:
    """List vLLM, `speculators` and SGLang, each with what loads the head in `folder` or the reason that it can't."""
    return [
        vllm_server(config, folder),
        Server(f"speculators {VERSION}", True, f"Eagle3DraftModel.from_pretrained({json.dumps(folder)})"),
        Server("SGLang", False, "does not know this config.json: export --format eagle3"),
    ]


SPECULATORS = Layout(
    name="speculators",
    head=Eagle3Speculator,
    architecture="Eagle3Speculator",
    fields=fields,
    servers=servers,
    translate=translate,
    also=("Eagle3DraftModel",),
    mark="speculators_model_type",
    shape=SHAPE,
    kept=KEPT,
    pack=pack,
    unpack=unpack,
)
