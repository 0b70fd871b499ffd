"""The head that a GGUF file describes, to check an export.

The `gguf` package reads the file, and its own table names the parts of a layer: only the keys of the metadata are the
writer's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speculator.checkpoints.table import Table, from_json, keys
from speculator.files import JsonObject

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_OWN_NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
    "candidate_selector.hidden_projection": "selector_hidden",
}
_OWN_TENSORS = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}
_CONVOLUTION = re.compile(r"layers\.(\d+)\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)")
_IN_BLOCK = {"attention": "attn", "mlp": "ffn", "base_kernel": "base", "kernel_projection.weight": "proj.weight"}
"""Parts of a head that the package's tables of models lack."""
_FACTORS, _TOKENS, _TARGETS = "rope_freqs.weight", "d2t", "output.weight"


def differences(head: Any, file: Path, table: Table) -> list[str]:
    """Return the names of what differs between a head and its GGUF file: config fields, "rope", tensors or "logits".

    An empty list means that a head made from the file is equal. `table` has the keys of its metadata.
    """
    from gguf import GGUFReader

    found = GGUFReader(file)
    stored = {each.name: each for each in found.tensors}
    read = {row.theirs: found.fields[row.theirs].contents() for row in keys(table) if row.theirs in found.fields}
    kind = found.fields["general.architecture"].contents()
    config = from_json(table, read, file) | _others(found, stored, kind)
    differ = [name for name, value in config.items() if not _same(getattr(head.config, name), value)]
    if differ:
        return differ
    angles = read[f"{kind}.rope.freq_base"] ** -np.arange(0, 1, 2 / head.config.head_dim)
    angles = angles / stored[_FACTORS].data if _FACTORS in stored else angles
    if not np.allclose(angles, head.rope.frequencies()[0], rtol=1e-5, atol=0):
        return ["rope"]
    given = {"n_predict": head.config.n_predict, "rope_parameters": head.config.rope_parameters, **config}
    with torch.device("meta"):  # allocates no memory: the weights are replaced below
        again = type(head)(type(head.config)(**given))
    weights, own = _weights(again, stored, interleaved="norm_before_fc" in config), head.state_dict()
    # Norms and biases are stored in float32, whatever the dtype of the matrices.
    weights = {name: tensor.to(own[name].dtype) for name, tensor in weights.items()}
    differ = [
        name for name, tensor in own.items() if name not in weights or not torch.equal(weights[name], tensor.cpu())
    ]
    if differ or (differ := sorted(set(stored) - {_FACTORS, _TOKENS, _TARGETS})):
        return differ
    again.load_state_dict(weights, assign=True)
    again.eval().to(head.device)
    return [] if torch.equal(again.logits(*head.probe()), head.logits(*head.probe())) else ["logits"]


def _others(found: GGUFReader, stored: dict[str, ReaderTensor], kind: str) -> JsonObject:
    """Return the fields of a head's config that a file shows by its vocabulary and its tensors, given by name."""
    made: JsonObject = {
        "vocab_size": len(found.fields["tokenizer.ggml.tokens"].data),
        "draft_vocab_size": len(stored[_TOKENS].data) if _TOKENS in stored else None,
    }
    if kind == "eagle3":
        return made
    rank = stored["markov_w1.weight"].shape[0] if "markov_w1.weight" in stored else 0
    return made | {"markov_rank": rank, "mask_token_id": found.fields["tokenizer.ggml.mask_token_id"].contents()}


def _weights(head: Any, stored: dict[str, ReaderTensor], interleaved: bool) -> dict[str, Tensor]:
    """Return dequantised tensors by the head's names, and remove the tensors that were used from `stored`.

    The ids of the draft vocabulary stay in `stored`. `head` has the file's shapes. If `interleaved`, rope pairs
    neighbouring features in the file's query and key projections, which are reordered.
    """
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.QWEN3, len(head.layers))
    made, size = {}, head.config.head_dim
    # Their rotation pairs features 0 and 1, 2 and 3; ours 0 and d/2, 1 and 1 + d/2.
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    for name in head.state_dict():
        part, _, kind = name.rpartition(".")
        if name == "draft_tokens":
            made[name] = torch.from_numpy(stored[_TOKENS].data.copy())
            continue
        if found := _CONVOLUTION.fullmatch(name):
            file_name = f"blk.{found[1]}.{_IN_BLOCK[found[2]]}_conv_{_IN_BLOCK[found[3]]}"
        else:
            known = _OWN_NAMES.get(part) or names.get_name(f"model.{part}") or names.get_name(part)
            file_name = _OWN_TENSORS.get(name) or f"{known}.{kind}"
        if (theirs := stored.pop(file_name, None)) is None:
            continue
        tensor = torch.from_numpy(np.array(dequantize(theirs.data, theirs.tensor_type)))
        if interleaved and part.endswith(("q_proj", "k_proj")):
            tensor = tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1)
        made[name] = tensor
    return made


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal, floats after rounding to GGUF's float32."""
    return ours == theirs or (isinstance(ours, float) and np.float32(ours) == np.float32(theirs))
