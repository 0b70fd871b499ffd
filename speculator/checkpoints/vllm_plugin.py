"""MLP heads for this project's vLLM plugin (`integrations/vllm`).

vLLM reads config.json as a Llama's, because it must know the model type; the head's own fields are added. Tensors have
the head's own names, tied ones are stored once.
"""

from __future__ import annotations

import math

import transformers

from speculator.checkpoints import commands
from speculator.checkpoints.base_model import with_own_embedding
from speculator.checkpoints.layout import KEPT, SHAPE, Layout, Server
from speculator.files import JsonObject
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


def fields(config: SpeculatorConfig, dtype: str) -> JsonObject:
    """Return the content of config.json: a Llama's and the head's fields.

    vLLM checks the Llama's sizes, but uses only `hidden_size` and `vocab_size`.
    """
    heads = math.gcd(config.emb_dim, 64)  # a power of 2, so that GPUs can share the heads
    llama = {
        "architectures": [VLLM_PLUGIN.architecture],
        "model_type": "llama",
        "dtype": dtype,
        "transformers_version": transformers.__version__,
        "hidden_size": config.emb_dim,
        "intermediate_size": config.inner_dim,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": config.emb_dim // heads,
        "max_position_embeddings": _ANY_LENGTH,
        "tie_word_embeddings": False,
    }
    kept = {name: getattr(config, name, None) for name in KEPT}
    return {
        **llama,
        **{name: getattr(config, name) for name in SHAPE},
        **{name: value for name, value in kept.items() if value is not None},
    }


VLLM_PLUGIN = Layout(
    name="vllm-plugin",
    head=MLPSpeculator,
    architecture="EagleMLPSpeculator",
    fields=fields,
    servers=servers,
    adapt=with_own_embedding,
)
