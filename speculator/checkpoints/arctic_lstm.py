"""LSTM heads for arctic-inference 0.3.0 (`sum_lstm`), as ArcticTraining writes them.

Its loader fails on prefixed tensor names and on integer widths: it fuses the four projections by their bare names, and
parses the widths as text.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers

from speculator.checkpoints.arctic import base_archs, servers
from speculator.checkpoints.base_model import with_own_embedding
from speculator.checkpoints.files import ForeignConfig
from speculator.checkpoints.ibm import IBM
from speculator.checkpoints.layout import Layout, origin
from speculator.errors import UserError, refuse
from speculator.files import JsonObject
from speculator.heads.base import SpeculatorConfig
from speculator.heads.lstm.model import LSTMSpeculator

_WIDTHS = ("inner_dim", "proj_dim", "emb_dim")  # of the state, the gates and the embedding, which must be equal
_METHOD = {"method": "sum_lstm", "tie_lstm_embs": True}


def fields(config: SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json in the layout of ArcticTraining's LSTM heads.

    Here `emb_dim` is the width of the head's embedding (our `inner_dim`), and `input_hidden_dim` is our `emb_dim`.
    Loaders require an entry per draft position in `top_k_tokens_per_head`, but ignore the values.
    """
    n = config.n_predict
    return {
        "architectures": [ARCTIC_LSTM.architecture],
        "model_type": "mlp_speculator",
        "torch_dtype": dtype,
        "transformers_version": transformers.__version__,
        "vocab_size": config.vocab_size,
        "input_hidden_dim": config.emb_dim,
        **dict.fromkeys(_WIDTHS, str(config.inner_dim)),
        "n_predict": n,
        "top_k_tokens_per_head": getattr(config, "top_k_tokens_per_head", None) or [1] * n,
        "n_candidates": getattr(config, "n_candidates", None) or n,
        "tie_weights": config.tie_weights,
        "scale_input": config.scale_input,
        **_METHOD,
        **origin(config),
        **base_archs(config),
    }


def translate(read: ForeignConfig, file: Path) -> JsonObject:
    """Convert the content of config.json to the fields of `LSTMSpeculatorConfig`; `file`, its path, is for errors."""
    for name, value in _METHOD.items():
        refuse((read.get(name) != value, f"{file}: {name} is {read.get(name)!r}; must be {value!r}"))
    widths = {str(read.get(name)) for name in _WIDTHS}
    if len(widths) > 1 or not re.fullmatch("[1-9][0-9]{0,8}", width := widths.pop()):
        raise UserError(f"{file}: {', '.join(_WIDTHS)} must be the same positive integer")
    refuse(("input_hidden_dim" not in read, f"{file}: input_hidden_dim is missing"))
    return {**read, "inner_dim": int(width), "emb_dim": read["input_hidden_dim"]}


ARCTIC_LSTM = Layout(
    name="arctic",
    head=LSTMSpeculator,
    architecture="ArcticLSTMSpeculatorPreTrainedModel",
    fields=fields,
    kept=IBM.kept,
    servers=servers,
    expandable=True,
    translate=translate,
    bare=True,
    adapt=with_own_embedding,
    also=("MLPVariantSpeculatorPreTrainedModel",),
)
