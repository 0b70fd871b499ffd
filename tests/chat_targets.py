"""Tiny random models that chat: their turns end by themselves."""

import torch
from conftest import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import Target

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ ('Q: ' if m['role'] == 'user' else 'A: ') + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


def tokenizer_of(template):
    tokenizer = tiny_tokenizer(280)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def tiny_llama():
    torch.manual_seed(0)
    shape = {"vocab_size": 282, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None))
    for parameter in model.model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10  # or it would say the same after any text
    return model


def chatty(model, template=CHATML):
    """A random model whose turns end, about one token in eight."""
    tokenizer = tokenizer_of(template)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.lm_head.weight[end] *= 2
    model.generation_config.eos_token_id = end
    return Target(model, tokenizer)


def save(target, folder):
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder
