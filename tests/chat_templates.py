"""Tiny chat tokenizers in the manner of the large families, and of templates that can't be masked."""

from conftest import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

# Llama 3: BOS written by the template, contents trimmed, <|eot_id|> ends every turn.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Qwen 3: thinking is left out of the turns before the last question, and the last answer has a block even if empty.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is defined %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<|im_start|>assistant\n<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\n{{ content }}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Gemma: the assistant is called model, a system message is refused, turns alternate.
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {
    # template, BOS, EOS, other special tokens, added tokens that are not special, what opens and ends an answer
    "llama3": (
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        [],
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    ),
    "qwen3": (
        QWEN3,
        None,
        "<|im_end|>",
        ["<|im_start|>"],
        ["<think>", "</think>"],
        ("<|im_start|>assistant\n", "<|im_end|>"),
    ),
    "gemma": (
        GEMMA,
        "<bos>",
        "<eos>",
        ["<start_of_turn>", "<end_of_turn>"],
        [],
        ("<start_of_turn>model\n", "<end_of_turn>"),
    ),
}


def chat_tokenizer(family: str = "qwen3", template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the family's special tokens and its template, or another one."""
    own, bos, eos, special, added, _ = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos} if bos else {"eos_token": eos})
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(added)
    if bos:  # put in front of every text, though the template writes it too: as the families' tokenizers do
        front = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = front
    tokenizer.chat_template = own if template is None else template
    return tokenizer


def answers_by_offsets(tokenizer: PreTrainedTokenizerFast, family: str, messages: list[dict]) -> tuple[list, list]:
    """Tokens and mask of a chat by another way than the package's: string search in the text, then offsets."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    opening, ending = FAMILIES[family][5]
    inside, place = [False] * len(text), 0
    while (start := text.find(opening, place)) >= 0:
        start += len(opening)
        place = text.index(ending, start) + len(ending)
        inside[start:place] = [True] * (place - start)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [int(inside[start]) for start, _ in encoded["offset_mapping"]]
