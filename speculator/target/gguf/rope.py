"""The rope of a GGUF file, of which transformers' loader takes no more than the base for most architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.target.gguf.header import Header

_FACTORS = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0  # `low_freq_factor` and `high_freq_factor` of all Llama 3 models
_ORIGINAL = [1024 << i for i in range(8)]


def set_rope(config: PreTrainedConfig, header: Header) -> None:
    """Set a file's rope (base, scaling, rotated share) in a config; one that we can't read raises a UserError."""
    text: Any = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        return
    # Where layers of two kinds have ropes of their own, the file's is that of full attention.
    own: Any = rope.get("full_attention", rope)
    known = {key.removeprefix(f"{header.architecture}.rope."): value for key, value in header.fields.items()}
    if base := known.get("freq_base"):
        own["rope_theta"] = base
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if header.architecture == "phi3" and (rotated := known.get("dimension_count")):
        own["partial_rotary_factor"] = rotated / head_dim
    if own.get("rope_type", "default") == "default":  # else transformers has read the scaling
        own.update(_scaling(header, known, own["rope_theta"], head_dim))


def _scaling(header: Header, known: Any, base: float, head_dim: int) -> JsonObject:
    """Return the scaling's fields of `rope_parameters`, {} for none; `known` has its metadata without the prefix."""
    tensors = {tensor.name: tensor.data for tensor in header.tensors}
    longrope = [name for name in tensors if name.startswith("rope_factors_")]
    refuse((longrope, f"the file's rope has factors of its own ({', '.join(longrope)}), which are not supported here"))
    if _FACTORS in tensors:
        return _of_factors(np.asarray(tensors[_FACTORS], np.float64), base, head_dim)
    kind = known.get("scaling.type", "linear")
    factor = known.get("scaling.factor") or known.get("scale_linear") or 1.0
    if kind == "none" or factor == 1.0:
        return {}
    refuse((kind not in ("linear", "yarn"), f"the file's rope is scaled by {kind}, which is not supported here"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    length = known.get("scaling.original_context_length") or header.fields[f"{header.architecture}.context_length"]
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}


def _of_factors(factors: np.ndarray, base: float, head_dim: int) -> JsonObject:
    """Return the fields of Llama 3's scaling for the numbers by which a file divides the rope's frequencies."""
    factor = float(factors.max())
    if factor == 1.0:
        return {}
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    for length in _ORIGINAL:
        # Long waves are divided by the factor, short ones by 1, and those between by something between.
        share = np.clip((length / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
        expected = 1 / ((1 - share) / factor + share)
        if expected.shape == factors.shape and np.allclose(expected, factors, rtol=1e-3):
            scaling = {"factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
            return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": length}
    raise UserError(f"{_FACTORS} of the file is not Llama 3's, and transformers has no other rope of this kind")
