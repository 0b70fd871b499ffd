"""The layout of the `speculators` library (0.9.0), which vLLM also reads.

It always stores the target's embedding: the library silently uses zeros if that is missing. A head that shares its
target's embedding is therefore written with a copy from the base model's files. When read, an embedding is the head's
own only if `embed_requires_grad` says that it was trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from speculator.checkpoints import layers
from speculator.checkpoints.arctic import base_archs
from speculator.checkpoints.base_model import base_matrix, needs_embedding
from speculator.checkpoints.eagle3 import FLAGS, ONE_LAYER, ORIGINAL_HEADS, other_lists, read_one_layer, vllm_server
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.layers import AUX_LAYERS, EMBEDDING, from_d2t, with_d2t
from speculator.checkpoints.layout import ORIGIN, Layout, Server
from speculator.checkpoints.table import ABSENT, DTYPE, Key, Table, constant, same, within
from speculator.errors import refuse
from speculator.files import Json
from speculator.heads.attention.base import DEFAULT_AUX_LAYERS
from speculator.heads.eagle3.config import Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator

VERSION = "0.9.0"


def method(algorithm: Callable[[Any], str]) -> tuple[Key, ...]:
    """Return the rows of `speculators_config`: how to draft, and for which target; `algorithm` is that of a config."""

    def methods(config: Any) -> Json:
        proposal = {"proposal_type": "greedy", "speculative_tokens": config.n_predict}
        return [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}]

    return within(
        "speculators_config",
        (
            Key(None, "algorithm", algorithm),
            constant("default_proposal_method", "greedy"),
            Key("n_predict", "proposal_methods", methods, back=lambda found, read: found[0]["speculative_tokens"]),
            Key("base_model_name_or_path", "verifier/name_or_path", lambda c: c.base_model_name_or_path, optional=True),
            Key(None, "verifier/architectures", lambda config: base_archs(config.base_model_name_or_path)),
        ),
    )


def _number_of_layers(config: Any) -> Any:
    """vLLM does not count the list in this layout."""
    return ABSENT if config.num_aux_layers == DEFAULT_AUX_LAYERS else config.num_aux_layers


TABLE: Table = (
    ORIGINAL_HEADS,
    constant("speculators_model_type", "eagle3", must=True),
    constant("speculators_version", VERSION),
    Key(DTYPE, "dtype"),
    layers.VERSION,
    layers.VOCABULARY,
    *same(*FLAGS),
    Key("own_embedding", "embed_requires_grad", optional=True),
    constant("target_hidden_size", None),
    Key("aux_layers", AUX_LAYERS, lambda config: config.aux_layers, optional=True),
    *method(lambda config: "eagle3"),
    *within("transformer_layer_config", (*ONE_LAYER, Key(None, "num_aux_hidden_states", _number_of_layers))),
    *ORIGIN,
)
# No key is left out, because readers have different defaults, or none.


def canonical(read: ForeignConfig, file: Path) -> ForeignConfig:
    """Return the content of a config.json with the keys that the library leaves out; its path `file` is for errors."""
    kind = read.get("speculators_model_type")
    refuse(
        (kind != "eagle3", f"{file}: speculators_model_type is {kind!r}; must be 'eagle3'"),
        (
            "norm_before_residual" not in read,
            f"{file}: norm_before_residual is missing; vLLM assumes true, and speculators false",
        ),
        *other_lists(read, file),
    )
    layer = {**read["transformer_layer_config"], "target_hidden_size": read.get("target_hidden_size")}
    absent = {**dict.fromkeys(FLAGS, False), "draft_vocab_size": 32000}
    layer = read_one_layer(layer, file, TABLE)
    return {**absent, **read, "vocab_size": layer["vocab_size"], "transformer_layer_config": layer}


def pack(head: Eagle3Speculator) -> dict[str, Tensor]:
    """Return the tensors to store: the head's, and the embedding, read from the target's files if the head has none."""
    weight = head.embedding_weight
    if weight is None:
        weight = base_matrix(head.config, "embedding")
    return {**with_d2t(head), EMBEDDING: weight.to(head.device, head.dtype)}


def unpack(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return stored tensors by the head's names, without the copy of the target's embedding; `where` is for errors.

    The head embeds tokens with that copy until `bind` replaces it with the target's own. A copy of zeros means that
    none was stored, so it is dropped. The embedding of a head that has its own (`own_embedding`) is returned too.
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
    table=TABLE,
    servers=servers,
    canonical=canonical,
    also=("Eagle3DraftModel",),
    mark="speculators_model_type",
    pack=pack,
    needs=needs_embedding,
    unpack=unpack,
)
