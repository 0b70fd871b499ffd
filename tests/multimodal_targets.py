"""Folders of tiny random multimodal models, saved by the multimodal classes, and their tokenizers."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import tiny_tokenizer
from transformers import (
    AutoModelForMultimodalLM,
    Gemma3Config,
    Gemma4Config,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3VLConfig,
)

_TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 28, "patch_size": 14}
_QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_QWEN_TOWER |= {"out_hidden_size": 32}
_QWEN_TOKENS = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}


def _mrope() -> dict:
    """Return M-RoPE settings, which configs change in place."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}


_SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
CONFIGS = {
    "gemma3": Gemma3Config(
        text_config={**_TEXT, "query_pre_attn_scalar": 8, "sliding_window": 6},
        vision_config=_TOWER | _IMAGE,
        mm_tokens_per_image=4,
        image_token_index=290,
        boi_token_index=291,
        eoi_token_index=292,
    ),
    "gemma4": Gemma4Config(
        text_config={
            **_TEXT,
            **_SHARED,
            "global_head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config=_TOWER | {"num_key_value_heads": 2, "head_dim": 8},
        image_token_id=290,
        boi_token_id=291,
        eoi_token_id=292,
        video_token_id=293,
        audio_token_id=294,
    ),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**_TEXT, sliding_window=None),
        vision_config=PixtralVisionConfig(**_TOWER, **_IMAGE, head_dim=8),
        image_token_index=290,
    ),
    "qwen2_5_vl": Qwen2_5_VLConfig(
        text_config=_TEXT | _mrope(), vision_config=_QWEN_TOWER | {"fullatt_block_indexes": [0]}, **_QWEN_TOKENS
    ),
    "qwen3_5": Qwen3_5Config(
        text_config=_TEXT | _mrope() | _LINEAR,
        vision_config=_QWEN_TOWER | {"num_position_embeddings": 16},
        **_QWEN_TOKENS,
    ),
    "qwen3_vl": Qwen3VLConfig(
        text_config=_TEXT | _mrope(),
        vision_config=_QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    ),
}


def save_multimodal(family: str, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedModel:
    """Save a model of the family, and return it."""
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(CONFIGS[family])
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data *= 4
    model.save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return model.eval()
