"""Tiny GGUF files, as llama.cpp's converter writes them."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape)).eval()


def write_gguf(
    file: Path,
    model: LlamaForCausalLM,
    tokenizer,
    leave_out: str = "",
    changes: dict | None = None,
    architecture: str = "llama",
) -> Path:
    """A Llama in float32 with its byte-level BPE, whose turns end with <|im_end|>; one field may be left out.

    `changes` has another list of tokens, which of them are unused, context length, name of how text is split, rope or
    its factors.
    """
    import gguf

    config, bpe = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = set(tokenizer.added_tokens_encoder)
    changes = {"tokens": tokens, "context_length": config.max_position_embeddings, "pre": "gpt-2", **(changes or {})}
    special |= set(changes["tokens"]) - set(tokens)

    def kind(token: str) -> int:
        return 5 if token in changes.get("unused", ()) else 3 if token in special else 1

    writer = gguf.GGUFWriter(file, architecture)
    fields = {
        "context_length": lambda: writer.add_context_length(changes["context_length"]),
        "embedding_length": lambda: writer.add_embedding_length(config.hidden_size),
        "block_count": lambda: writer.add_block_count(config.num_hidden_layers),
        "feed_forward_length": lambda: writer.add_feed_forward_length(config.intermediate_size),
        "head_count": lambda: writer.add_head_count(config.num_attention_heads),
        "head_count_kv": lambda: writer.add_head_count_kv(config.num_key_value_heads),
        "eps": lambda: writer.add_layer_norm_rms_eps(config.rms_norm_eps),
        "vocab_size": lambda: writer.add_vocab_size(config.vocab_size),
        "model": lambda: writer.add_tokenizer_model("gpt2"),
        "pre": lambda: writer.add_tokenizer_pre(changes["pre"]),
        "tokens": lambda: writer.add_token_list(changes["tokens"]),
        "types": lambda: writer.add_token_types([kind(token) for token in changes["tokens"]]),
        "merges": lambda: writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]]),
        "bos_token_id": lambda: writer.add_bos_token_id(changes.get("bos", tokenizer.convert_tokens_to_ids("<eos>"))),
        "eos_token_id": lambda: writer.add_eos_token_id(tokenizer.convert_tokens_to_ids("<|im_end|>")),
        "chat_template": lambda: writer.add_chat_template(TEMPLATE),
    }
    for name, add in fields.items():
        if name != leave_out:
            add()
    if "add_bos" in changes:
        writer.add_add_bos_token(changes["add_bos"])
    for key, value in (changes.get("rope") or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.rope.{key}", value)
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes["rope_freqs"])
    for name, weight in model.state_dict().items():
        writer.add_tensor(_name(name), _stored(name, weight, config).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name(name: str) -> str:
    apart = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name.startswith("model.layers."):
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        return f"blk.{layer}.{_PARTS[part]}.weight"
    return apart.get(name, "output.weight")


def _stored(name: str, weight: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """llama.cpp rotates neighbouring features, transformers those half a head apart."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), None)
    if count is None:
        return weight
    return weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
