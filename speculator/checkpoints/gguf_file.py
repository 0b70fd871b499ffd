"""GGUF files of EAGLE-3 heads and block drafters, as llama.cpp reads them: keys and tensors are its converter's.

The vocabulary is copied from the target's GGUF file, so no tokenizer has to be recognised. No command reads the file as
a head: it lacks what llama.cpp does not ask for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculator.checkpoints import gguf_head, limits
from speculator.checkpoints.block_drafters import BOTH_PARTS, OUTPUT, PARTS, kind_of
from speculator.checkpoints.commands import BASE, line
from speculator.checkpoints.layers import with_d2t
from speculator.checkpoints.layout import Layout, Server
from speculator.checkpoints.limits import Limit, exceeded
from speculator.checkpoints.table import ABSENT, DTYPE, Key, Lack, Table, constant, given_for, same, to_json
from speculator.checkpoints.targets import LLAMA_CPP, refusal
from speculator.errors import UserError, refuse
from speculator.files import Json, JsonObject
from speculator.heads.attention.base import AttentionConfig
from speculator.heads.dspark.config import DSparkSpeculatorConfig
from speculator.heads.dspark.model import DSparkSpeculator
from speculator.heads.eagle3.model import Eagle3Speculator
from speculator.target.fingerprint import has_matrix, sample_indices
from speculator.target.gguf.file import is_gguf, metadata

FILE = "head.gguf"
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_OTHERS = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_WHOLE = {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
"""Tensors whose names don't end in weight or bias, as named here and in llama.cpp."""


def _table(architecture: str, lacks: Table, *more: Key) -> Table:
    """Return the rows of a head's GGUF metadata, whose keys begin with `architecture`."""
    own = (
        Key("num_hidden_layers", "block_count") if architecture == "dflash" else constant("block_count", 1),
        Key("max_position_embeddings", "context_length"),
        Key("emb_dim", "embedding_length"),
        Key("inner_dim", "feed_forward_length"),
        Key("num_attention_heads", "attention.head_count"),
        Key("num_key_value_heads", "attention.head_count_kv"),
        Key("head_dim", "attention.key_length"),
        Key(None, "attention.value_length", lambda c: c.head_dim),
        Key("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        Key(None, "rope.freq_base", lambda c: float(c.rope_parameters["rope_theta"])),
        Key("aux_layers", "target_layers"),
        *more,
    )
    return (
        *lacks,
        Lack(lambda c: not c.aux_layers, "gguf: the head names no auxiliary layers".format),
        constant("general.type", "model"),
        constant("general.name", "head"),
        Key(DTYPE, "general.file_type", _FILE_TYPES.get),
        constant("general.quantization_version", 2),
        *(replace(row, theirs=f"{architecture}.{row.theirs}") for row in own),
    )


def _lack(limits_of: Callable[[Any], Iterable[Limit]], advice: str = "", **reads: Json) -> Lack:
    def named(config: Any) -> str:
        return ", ".join(exceeded(limits_of(config), config))

    return Lack(named, lambda config: f"gguf: llama.cpp does not run {named(config)}{advice}", reads)


TABLES: dict[str, Table] = {
    "eagle3": _table(
        "eagle3",
        (
            _lack(
                lambda c: limits.EAGLE3[LLAMA_CPP],
                ": configs/llama-cpp.yaml trains a head without",
                **dict.fromkeys(("fc_norm", "norm_output", "qk_norm", "attention_bias"), False),
            ),
        ),
        Key(None, "target_hidden_size", lambda c: c.emb_dim),
        *same("norm_before_residual", "norm_before_fc", "vocab_size"),
        Key(None, "rope.dimension_count", lambda c: c.head_dim),
    ),
    # To llama.cpp a block drafter with a Markov head is DSpark, and one with a selector is DFlash 2.
    "dflash": _table(
        "dflash",
        (*BOTH_PARTS, _lack(lambda c: limits.BLOCK[kind_of(c)][LLAMA_CPP])),
        Key(
            "n_predict",
            "block_size",
            lambda c: c.block_size,
            back=lambda size, read: size - (not read.get("dflash.sample_from_anchor", False)),
        ),
        Key("is_causal", "attention.causal"),
        *given_for(lambda c: kind_of(c) == "dflash2", PARTS),
        Key("sliding_window", "attention.sliding_window", optional=True),
        Key(
            None,
            "attention.sliding_window_pattern",
            lambda c: [True] * c.num_hidden_layers if c.sliding_window else ABSENT,
        ),
        *given_for(
            lambda c: kind_of(c) == "dspark",
            (
                Key("sample_from_anchor", "sample_from_anchor", default=False),
                Key("confidence_head", "has_confidence_head", default=False),
            ),
        ),
    ),
}


def _name(name: str) -> str:
    """Return llama.cpp's name of a tensor, given its name in the flat layout."""

    def renamed(name: str, parts: dict[str, str]) -> str:
        part, _, kind = name.rpartition(".")
        return _WHOLE[name] if name in _WHOLE else f"{parts[part]}.{kind}"

    if found := re.fullmatch(r"layers\.(\d+)\.(.+)", name):
        return f"blk.{found[1]}.{renamed(found[2], _PARTS)}"
    return renamed(name, _OTHERS)


def tensors(head: Any, packed: dict[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """Return a head's tensors by llama.cpp's names.

    Norms, and tensors that are not matrices, are converted to float32; "d2t" holds the ids of the draft vocabulary.

    Args:
        packed: the tensors by their names in the flat layout.
        interleaved: llama.cpp rotates neighbouring dimensions of this head, so the rows of q and k are permuted.
    """
    config, made = head.config, {}
    for name, tensor in packed.items():
        if name in ("d2t", "t2d"):
            continue
        if interleaved and (found := re.search(r"self_attn\.([qk])_proj", name)):
            count = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
            # Ours pairs dimensions i and i + d/2 of a head, theirs 2i and 2i + 1: 0 1 2 3 become 0 2 1 3.
            halves = tensor.reshape(count, 2, -1, tensor.shape[-1])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        made[_name(name)] = tensor.float() if tensor.ndim != 2 or "_norm." in _name(name) else tensor
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":  # stored as what divides the plain frequencies
        plain = rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        made["rope_freqs.weight"] = plain / head.rope.frequencies()[0]
    if head.draft_tokens is not None:
        made["d2t"] = head.draft_tokens
    return made


def pack_block(head: DSparkSpeculator) -> dict[str, Tensor]:
    """Return a block drafter's tensors by their names in the flat layout.

    With a draft vocabulary its rows of the output matrix are added from the target's GGUF file. Raises a UserError if
    that file has other weights than the head was trained for.
    """
    packed = with_d2t(head)
    if head.draft_tokens is not None:
        from gguf import dequantize

        target, trained_for = head.config.base_model_name_or_path or "", head.config.base_model_fingerprint
        found = {tensor.name: tensor for tensor in metadata(target).tensors}
        matrix = found.get("output.weight", found.get("token_embd.weight"))  # tied targets store one
        if matrix is None:
            raise UserError(f"{target} has no output matrix")
        if trained_for:
            places, columns = sample_indices(head.config.vocab_size, head.config.emb_dim)
            sampled = torch.from_numpy(dequantize(matrix.data[places.tolist()], matrix.tensor_type))  # [8, D]
            same = has_matrix(trained_for, "output", sampled[range(len(columns)), columns], quantised=True)
            refuse((not same, f"{target} has other weights than the head was trained for: --base_model names the file"))
        rows = dequantize(matrix.data[head.draft_tokens.tolist()], matrix.tensor_type)
        packed[OUTPUT] = torch.from_numpy(rows).to(head.dtype)
    return packed


def _array(tensor: Tensor) -> tuple[np.ndarray, Any]:
    """Return a tensor's data as an array, and its GGUF type: None if the writer can tell it from the array's dtype."""
    from gguf import GGMLQuantizationType, quants

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return quants.quantize(tensor.float().numpy(), GGMLQuantizationType.BF16), GGMLQuantizationType.BF16
    return tensor.numpy(), None  # the writer knows numpy's types


def needs_gguf(config: Any) -> str | None:
    """Return what an export lacks if the base model in a head's config is no GGUF file: `Layout.needs`."""
    is_file = is_gguf(config.base_model_name_or_path or "")
    return None if is_file else "gguf: the vocabulary comes from the target's file: --base_model TARGET.gguf"


def writer(architecture: str, pack: Callable[[Any], dict[str, Tensor]]) -> Callable[[Any, JsonObject, Path], None]:
    """Return `Layout.write` for GGUF: it writes a head as one file, reads it back and compares.

    Args:
        architecture: llama.cpp's name, "eagle3" or "dflash".
        pack: returns the head's tensors by their names in the flat layout.
    """

    def write(head: Any, keys: JsonObject, folder: Path) -> None:
        target = head.config.base_model_name_or_path or ""
        if missing := needs_gguf(head.config):
            raise UserError(missing)
        known = metadata(target)
        from gguf import GGUFValueType, GGUFWriter

        made = GGUFWriter(folder / FILE, architecture)
        types = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
        for key, value in keys.items():
            if isinstance(value, list):
                made.add_array(key, value)
            else:
                made.add_key_value(key, value, types.get(type(value), GGUFValueType.STRING))
        for key, value in known.fields.items():
            if key.startswith("tokenizer.") and value != []:
                kind = GGUFValueType(known.types[key])
                kinds = (GGUFValueType.ARRAY, kind) if isinstance(value, list) else (kind,)
                made.add_key_value(key, value, *kinds)
        count = len(known.fields["tokenizer.ggml.tokens"])
        if count != head.config.vocab_size:
            raise UserError(f"{target} has {count} tokens, and the head {head.config.vocab_size}")
        if (mask := getattr(head.config, "mask_token_id", None)) is not None:
            made.add_mask_token_id(mask)
        arrays = {name: _array(each) for name, each in tensors(head, pack(head), architecture == "eagle3").items()}
        for name, (array, kind) in arrays.items():
            made.add_tensor(name, array, raw_dtype=kind)
        made.write_header_to_file()
        made.write_kv_data_to_file()
        made.write_tensors_to_file()
        made.close()
        if differ := gguf_head.differences(head, folder / FILE, TABLES[architecture]):
            raise UserError(f"the written head differs in {', '.join(differ)}; nothing was kept")

    return write


def servers(config: AttentionConfig, folder: str) -> list[Server]:
    """Return one entry, for llama.cpp: its command for the head in `folder`, or the reason that it can't load it."""
    block = isinstance(config, DSparkSpeculatorConfig)
    try:
        to_json(TABLES["dflash" if block else "eagle3"], config, "float32")
        refused = refusal(LLAMA_CPP, config.base_model_name_or_path)
    except UserError as error:
        refused = str(error)
    base = config.base_model_name_or_path or ""
    kind = config.method(vars(config)) if block else "eagle3"
    head = ("-md", f"{folder}/{FILE}", "--spec-type", f"draft-{kind}", "--spec-draft-n-max", str(config.n_predict))
    start = line(base if is_gguf(base) else "TARGET.gguf", "llama-server", "-m", BASE, *head)
    return [Server.of(LLAMA_CPP, refused, start)]


GGUF = tuple(
    Layout(
        name="gguf",
        head=head,
        architecture=architecture,
        table=TABLES[architecture],
        servers=servers,
        needs=needs_gguf,
        write=writer(architecture, pack),
    )
    for head, architecture, pack in ((Eagle3Speculator, "eagle3", with_d2t), (DSparkSpeculator, "dflash", pack_block))
)
