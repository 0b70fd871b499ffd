"""The layout of the `speculators` library (0.9.0), which vLLM reads as well.

It holds the target's embedding, always: the library fills in zeros where it is not, without a word. So a head that
reads its target's is written from the base model's files, and an embedding that is read is the head's own only if
`embed_requires_grad` says that it was trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculator.checkpoints import files
from speculator.checkpoints.arctic import base_archs
from speculator.checkpoints.eagle3 import (
    EMBEDDING,
    FLAGS,
    KEPT,
    SHAPE,
    TAPS,
    drafted,
    from_llama,
    from_tables,
    llama,
    tables,
    vllm,
)
from speculator.checkpoints.layout import Layout, Server, base_config
from speculator.errors import UserError, refuse
from speculator.heads.eagle3.config import DEFAULT_AUX_LAYERS, Eagle3SpeculatorConfig
from speculator.heads.eagle3.model import Eagle3Speculator
from speculator.target.gguf import is_gguf

VERSION = "0.9.0"


def fields(config: Eagle3SpeculatorConfig, dtype: str) -> dict[str, Any]:
    """config.json, every field written out: readers have different defaults, or none."""
    layer = llama(config)
    if config.num_aux_layers != DEFAULT_AUX_LAYERS:
        layer["num_aux_hidden_states"] = config.num_aux_layers  # vLLM counts no taps in this layout
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.n_predict}
    verifier = {
        "name_or_path": config.base_model_name_or_path,
        "architectures": base_archs(config).get("base_model_archs", []),
    }
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
        TAPS: config.aux_layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
    }


def translate(read: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields under the names that they have here.

    Raises:
        UserError: another kind of speculator, or parts that are absent.
    """
    kind, layer = read.get("speculators_model_type"), read.get("transformer_layer_config")
    about = read.get("speculators_config")
    refuse(
        (kind != "eagle3", f"{file}: speculators_model_type is {kind!r}; known is 'eagle3' only"),
        (not isinstance(layer, dict), f"{file}: transformer_layer_config is no object"),
        (not isinstance(about, dict), f"{file}: speculators_config is no object"),
    )
    assert isinstance(layer, dict)
    assert isinstance(about, dict)
    try:
        steps = about["proposal_methods"][0]["speculative_tokens"]
        base = about["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{file}: speculators_config has no proposal method or no verifier ({error})") from None
    refuse(
        (
            "norm_before_residual" not in read,
            f"{file}: no norm_before_residual in it, which vLLM takes for true and speculators for false",
        )
    )
    shape = from_llama({**layer, "target_hidden_size": read.get("target_hidden_size")}, file)
    return {
        **shape,
        **{name: read.get(name, False) for name in FLAGS},
        "n_predict": steps,
        "draft_vocab_size": drafted(read.get("draft_vocab_size", 32000), shape["vocab_size"]),
        "aux_layers": read.get(TAPS),
        "own_embedding": read.get("embed_requires_grad", False),
        "base_model_name_or_path": base,
    }


def pack(head: Eagle3Speculator) -> dict[str, Tensor]:
    """The tensors as stored.

    Raises:
        UserError: the target's embedding is not at hand.
    """
    weight = head.embedding_weight
    if weight is None:
        weight = base_embedding(head.config)
    return {**tables(head), EMBEDDING: weight.to(head.device, head.dtype)}


def unpack(where: Path, head: Eagle3Speculator, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored tensors as the head has them; an embedding that was not trained is lent to it, unless it is zeros.

    Raises:
        UserError: an embedding of another shape, or no draft vocabulary.
    """
    tensors, config = from_tables(where, head, tensors), head.config
    if not config.own_embedding and EMBEDDING in tensors:
        weight = tensors.pop(EMBEDDING)
        shape = (config.vocab_size, config.emb_dim)
        refuse(
            (weight.shape != shape, f"{where}: {EMBEDDING} is {list(weight.shape)}, config.json says {list(shape)}"),
            (not weight.isfinite().all(), f"{where}: {EMBEDDING} has values that are not finite"),
        )
        if weight.any():
            head.share_embedding(weight)
    return tensors


def base_embedding(config: Any) -> Tensor:  # [V, D]
    """The target's embedding, from its own files: nothing else of them is read, and nothing is fetched.

    Raises:
        UserError: they are not on this machine, or hold no such tensor.
    """
    name = config.base_model_name_or_path
    known = base_config(name)
    where = f"the speculators layout holds the target's embedding, and {name or 'the base model'} "
    refuse((known is None, f"{where}is not on this machine: --base_model names a folder or a model of the hub's cache"))
    refuse((is_gguf(name), f"{where}is a GGUF file: --base_model names the same model in safetensors"))
    cached = None if Path(name).is_dir() else try_to_load_from_cache(name, files.CONFIG)
    folder = Path(cached).parent if isinstance(cached, str) else Path(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    embedding = model.get_input_embeddings().weight
    tensor_name = next(name for name, weight in model.named_parameters() if weight is embedding)
    found = _tensor(folder, {tensor_name, tensor_name.removeprefix(f"{model.base_model_prefix}.")})
    shape = [config.vocab_size, config.emb_dim]
    refuse(
        (found is None, f"{where}has no {tensor_name} in safetensors files in {folder}"),
        (found is not None and list(found.shape) != shape, f"{where}has one that is not {shape}"),
    )
    assert found is not None
    return found


def _tensor(folder: Path, names: set[str]) -> Tensor | None:
    """The first tensor of one of these names in a folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in names & set(opened.keys()):
                    return opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: damaged: {error}") from None
    return None


def servers(config: Eagle3SpeculatorConfig, folder: str) -> list[Server]:
    """Who loads it."""
    how = f'Eagle3DraftModel.from_pretrained("{folder}")'
    return [
        vllm(config, folder),
        Server(f"speculators {VERSION}", True, how),
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
