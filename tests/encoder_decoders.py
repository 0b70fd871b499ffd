"""Tiny random encoder-decoder models, by how their decoders know positions."""

import copy
from pathlib import Path

import torch
import transformers
from conftest import tiny_tokenizer
from packaging.version import Version
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    LongT5Config,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    SwitchTransformersConfig,
    T5Config,
    T5GemmaConfig,
    UMT5Config,
)

VOCAB = 99
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
_T5 |= {"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
_BART = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
_BART |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_BART |= {"forced_eos_token_id": None, "tie_word_embeddings": False}
_GEMMA = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
_GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4, "max_position_embeddings": 64}
_GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
BY_DISTANCE = {
    "t5": T5Config(**_T5),
    "flan": T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": MT5Config(**_T5, num_decoder_layers=3),
    "umt5": UMT5Config(**_T5),
    "longt5": LongT5Config(**_T5),
    "switch": SwitchTransformersConfig(**_T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
}
"""A bias on the scores, by distance."""
if Version(transformers.__version__) < Version("5.19"):
    del BY_DISTANCE["umt5"]  # its decoder is not causal with sdpa: earlier logits depend on later tokens
BY_TABLE = {
    "bart": BartConfig(**_BART),
    "mbart": MBartConfig(**_BART),
    "marian": MarianConfig(**_BART | {"decoder_start_token_id": 1}),
    "pegasus": PegasusConfig(**_BART),
    "m2m_100": M2M100Config(**_BART),
}
"""A row of a table of positions, added to the embedding."""
BY_ARGUMENT = {
    "t5gemma": T5GemmaConfig(
        encoder=dict(_GEMMA), decoder=dict(_GEMMA), vocab_size=VOCAB, bos_token_id=2, pad_token_id=0, eos_token_id=1
    )
}
"""The argument `position_ids`."""
CONFIGS = BY_DISTANCE | BY_TABLE | BY_ARGUMENT


def tiny_encoder_decoder(family: str, dtype: torch.dtype = torch.float32, **changes):
    """Make a random model whose distributions are far from uniform, and whose source matters."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    config.update(changes)
    model = AutoModelForSeq2SeqLM.from_config(config).to(dtype)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and family in BY_TABLE:
            weight.data *= 4
        elif weight.ndim == 2:  # else the newest token's embedding alone decides
            embedding, mixed = (
                "shared" in name or "embed_tokens" in name,
                "ttention.o." in name or "ttention.v." in name,
            )
            bias, others = "relative_attention_bias" in name, 4 if family in BY_ARGUMENT else 1
            weight.data *= 8 if bias else 0.1 * others if embedding else 3 if mixed else others
    return model.eval()


def save_encoder_decoder(folder: Path, family: str = "t5", start: int = 299, **changes) -> Path:
    """Save such a model with a tokenizer whose token 0 ends texts."""
    ids = {"eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": start}
    model = tiny_encoder_decoder(family, vocab_size=300, **ids, **changes)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Make texts of the given lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]
