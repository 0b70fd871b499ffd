r"""How the text of a GGUF file's model is split before merges: the regexes that `tokenizer.ggml.pre` stands for.

The file has only the name. The regexes are those of the models' own tokenizer.json, as src/llama-vocab.cpp of
llama-cpp-python 0.3.36 lists them. transformers 5.23 knows some of the names and splits the text of the others as GPT-2
does: SmolLM2's "a  12" became "a", " ", " 12" in place of "a", "  ", "1", "2".
"""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerBase

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TITLE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
_LLAMA3 = ("|".join((_ENGLISH, _WORD, r"\p{N}{1,3}", _SIGNS, _SPACE)),)
_QWEN2 = ("|".join((_ENGLISH, _WORD, r"\p{N}", _SIGNS, _SPACE)),)
_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = ("|".join((_ENGLISH, *_MARKS, _SPACE)),)
_TEKKEN = ("|".join((_TITLE, _CAPITALS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE)),)
_CASED = f"{_TITLE}{_ENGLISH}?", f"{_CAPITALS}{_ENGLISH}?"
_GPT4O = ("|".join((*_CASED, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE)),)
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_SEED = ("|".join((_ENGLISH, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE)),)
_BAILING = ("|".join((r"'(?i:[sdmt]|ll|ve|re)", _WORD, r"\p{N}", _SIGNS, r"\s*[\r\n]|\s+(?!\S)|\s+")),)
_NAMES = {
    _GPT2: "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum gigachat a.x-4.0",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    _QWEN35: "qwen35",
    _TEKKEN: "tekken",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    _DEEPSEEK_CODER: "deepseek-coder",
    _SEED: "seed-coder",
    _BAILING: "bailingmoe bailingmoe2 llada-moe",
}
SPLITS = {name: split for split, names in _NAMES.items() for name in names.split()}
"""Regexes by the value of `tokenizer.ggml.pre`; each one splits the pieces of the one before."""
_AS_LLAMA3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
WITH_BOS = _AS_LLAMA3 | {"tekken"}
"""Names for which text begins with BOS, unless the file says otherwise."""
_WHOLE_WORDS = _AS_LLAMA3 | {"glm4", "glm5", "tekken"}
"""Names for which a piece that is in the vocabulary is a token, whatever its merges give."""


def set_split(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Let a byte-level BPE tokenizer split text as `name` says, a value of `tokenizer.ggml.pre` that is in `SPLITS`."""
    # Each regex splits the pieces of the one before. What none of them matches stays a piece of its own.
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[name]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of])
    tokenizer.backend_tokenizer.model.ignore_merges = name in _WHOLE_WORDS
