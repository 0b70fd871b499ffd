"""Tiny real models, built from their configs: nothing is downloaded."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.target import Target

VOCAB = 32
_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "mistral": MistralConfig(**_SHAPE, sliding_window=6),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=6),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def tiny_model(family: str = "llama", scale: float = 4.0):
    """A random model whose laws are far from uniform: its weights are `scale` times the usual ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= scale
    return model.eval()


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(), tokenizer=None)


@pytest.fixture
def head() -> MLPSpeculator:
    return tiny_head()


def tiny_head(n_predict: int = 3) -> MLPSpeculator:
    torch.manual_seed(1)
    config = MLPSpeculatorConfig(vocab_size=VOCAB, emb_dim=32, inner_dim=16, n_predict=n_predict)
    return MLPSpeculator(config)
