"""MLP heads for this project's vLLM plugin (`integrations/vllm`).

vLLM reads config.json as a Llama's, because it must know the model type; the head's own fields are added. Tensors have
the head's own names, tied ones are stored once.
"""

from __future__ import annotations

import math
from typing import Any

import transformers

from speculator.checkpoints import commands
from speculator.checkpoints.base_model import needs_embedding, with_own_embedding
from speculator.checkpoints.layout import ORIGIN, Layout, Server
from speculator.checkpoints.table import DTYPE, Key, constant, same
from speculator.heads import MLPSpeculator
from speculator.heads.base import SpeculatorConfig

VERSION = "0.32.0"
_ANY_LENGTH = 2**24  # a head has no positions, so the target's context decides


def servers(config: SpeculatorConfig, folder: str) -> list[Server]:
    """Return one entry, for vLLM with this project's plugin: how to install that and serve the head in `folder`."""
    options = {"method": "eagle", "model": folder, "num_speculative_tokens": config.n_predict}
    serve = commands.vllm(config.base_model_name_or_path, **options)
    how = f"pip install ./integrations/vllm into vLLM's environment, then {serve}"
    return [Server(f"vLLM {VERSION} with this project's plugin", True, how)]


def _heads(config: Any) -> int:
    """Return a number of attention heads: a power of 2, so that GPUs can share them."""
    return math.gcd(config.emb_dim, 64)


VLLM_PLUGIN = Layout(
    name="vllm-plugin",
    head=MLPSpeculator,
    architecture="EagleMLPSpeculator",
    # vLLM checks the Llama's sizes, but uses only `hidden_size` and `vocab_size`.
    table=(
        constant("model_type", "llama"),
        Key(DTYPE, "dtype"),
        constant("transformers_version", transformers.__version__),
        Key(None, "hidden_size", lambda config: config.emb_dim),
        Key(None, "intermediate_size", lambda config: config.inner_dim),
        constant("num_hidden_layers", 1),
        Key(None, "num_attention_heads", _heads),
        Key(None, "num_key_value_heads", _heads),
        Key(None, "head_dim", lambda config: config.emb_dim // _heads(config)),
        constant("max_position_embeddings", _ANY_LENGTH),
        constant("tie_word_embeddings", False),
        *same("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input"),
        *ORIGIN,
        *same("draft_vocab_size", "top_k_tokens_per_head", "n_candidates", optional=True),
    ),
    servers=servers,
    adapt=with_own_embedding,
    needs=needs_embedding,
)
