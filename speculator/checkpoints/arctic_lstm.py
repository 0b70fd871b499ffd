"""The LSTM head's layout for arctic-inference 0.3.0 (`sum_lstm`), and what ArcticTraining writes for it.

Its loader fuses the four projections by their bare names before it would strip a prefix, and it parses the widths as
text: a prefixed name or an integer width stops it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import transformers

from speculator.checkpoints.arctic import base_archs, servers
from speculator.checkpoints.ibm import IBM
from speculator.checkpoints.layout import Layout
from speculator.errors import refuse
from speculator.heads.base import SpeculatorConfig
from speculator.heads.lstm.model import LSTMSpeculator

_WIDTHS = ("inner_dim", "proj_dim", "emb_dim")  # of the state, the gates and the embedding: one width here
_METHOD = {"method": "sum_lstm", "tie_lstm_embs": True}


def fields(config: SpeculatorConfig, dtype: str) -> dict[str, Any]:
    """config.json. `emb_dim` is the width of the token embedding there, the target's hidden size `input_hidden_dim`.

    `top_k_tokens_per_head` has to have an entry per head, and nobody reads them.
    """
    n, base = config.n_predict, config.base_model_name_or_path
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
        **({"base_model_name_or_path": base} if base else {}),
        **base_archs(config),
    }


def translate(read: dict[str, Any], file: Path) -> dict[str, Any]:
    """The fields under the names that they have here.

    Raises:
        UserError: another method, gates with embeddings of their own, deeper stacks, or widths that differ.
    """
    for name, value in _METHOD.items():
        refuse((read.get(name) != value, f"{file}: {name} is {read.get(name)!r}; known is {value!r} only"))
    widths = {name: str(read.get(name)) for name in _WIDTHS}
    refuse(
        ("input_hidden_dim" not in read, f"{file}: no input_hidden_dim in it"),
        (
            not all(re.fullmatch("[0-9]{1,9}", width) and int(width) for width in widths.values()),
            f"{file}: no single width: {widths}",
        ),
        (len(set(widths.values())) > 1, f"{file}: the widths of an LSTM head have to be one: {widths}"),
    )
    return {**read, "inner_dim": int(widths["inner_dim"]), "emb_dim": read["input_hidden_dim"]}


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
    also=("MLPVariantSpeculatorPreTrainedModel",),
)
