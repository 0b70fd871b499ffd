"""Targets in GGUF files, whose weights transformers' own loader reads and dequantises.

Config, tokenizer and chat template come from the file's metadata. Making them takes seconds, so they are kept in the
cache as a folder of the forms that transformers loads.
"""

from __future__ import annotations

import json
import logging
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)

from speculator.errors import UserError, first_line, refuse
from speculator.files import cache_folder, check_input, locked, make_cache_folder, new_folder
from speculator.target.gguf.header import MAGIC, Header, quick_loader, read_header
from speculator.target.gguf.rope import set_rope
from speculator.target.gguf.splits import SPLITS, WITH_BOS, set_split

# transformers shows one line per tensor in log files; `disable=None` keeps its progress bar to terminals.
modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=None)  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)
_EDITION = 5
"""Number of the way in which a file's metadata becomes a folder; folders of an earlier one are not read."""
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose attention is scaled by another size than a head's, which no file has, by architecture."""
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # types of tokens: text never contains control tokens
_TOKENS, _TYPES, _EOS = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "eos_token_id"))
_MARKED_ENDS = (_EOS, *(f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")))
_BAR = "\uff5c"  # DeepSeek's vertical bar
NAMED_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", f"<{_BAR}end▁of▁sentence{_BAR}>", "[e~["),
    # around the parts of a prompt for infilling
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>"),
    *("<REPO>", "<reponame>", "<|file_sep|>"),
}
"""Control tokens that end a completion in llama.cpp, by their text: `special_eog_ids` in its src/llama-vocab.cpp.

From the sources of llama-cpp-python 0.3.36.
"""
_NO_ENDS = (
    # Where the first are control tokens, the last one separates parts of an answer or is text.
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
    ({"<|plamo:eos|>"}, "</s>"),
)


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def read_config(
    name: str, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> PreTrainedConfig:
    """Return the config of a hub id, folder or GGUF file, without weights; `AutoConfig` gets the `options`."""
    return AutoConfig.from_pretrained(**_located(name, revision), **options, trust_remote_code=trust_remote_code)


def read_tokenizer(name: str, trust_remote_code: bool = False, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub id, folder or GGUF file."""
    if is_gguf(name):  # tokenizer.json as it is: the class of a family may build another one from its vocabulary
        return PreTrainedTokenizerFast.from_pretrained(**_located(name, revision))
    return AutoTokenizer.from_pretrained(**_located(name, revision), trust_remote_code=trust_remote_code)


def load_model(kind: Any, name: str, revision: str | None = None, **options: Any) -> Any:
    """Return what `kind.from_pretrained` returns for a hub id, folder or GGUF file, whose weights are dequantised."""
    if not is_gguf(name):
        return kind.from_pretrained(**_located(name, revision), **options)
    file = Path(name)
    options |= {"config": read_config(name), "quantization_config": GgufConfig(dequantize=True)}
    with quick_loader():
        return kind.from_pretrained(str(file.parent), gguf_file=file.name, **options)


def _located(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` finds a target's files; for a GGUF file, see `_settings`."""
    refuse((revision is not None and Path(name).exists(), f"revision {revision}: {name} is on this disk, so has none"))
    return {"pretrained_model_name_or_path": str(_settings(name)) if is_gguf(name) else name, "revision": revision}


def metadata(name: str) -> Header:
    """Return the header of a GGUF file; raise a UserError if the file is damaged, or a package for it is missing."""
    file = check_input(name)
    with file.open("rb") as stream:
        refuse((stream.read(len(MAGIC)) != MAGIC, f"{name} is not a GGUF file"))
    try:
        import accelerate  # noqa: F401  transformers needs it to load GGUF files
        import gguf  # noqa: F401
    except ImportError as error:
        package = "accelerate" if "accelerate" in str(error) else "gguf"
        raise UserError(f"{name}: GGUF files need the package {package}: pip install {package}") from None
    try:
        header = read_header(file, file.stat().st_mtime_ns)
        length = f"{header.architecture}.context_length"
    except Exception as error:  # a damaged file holds anything
        raise UserError(f"{name} is damaged or cut short: {first_line(error)}") from None
    missing = [key for key in (length, _EOS, _TOKENS) if key not in header.fields]
    refuse((missing, f"{name}: its metadata lack {', '.join(missing)}"))
    return header


def end_tokens(header: Header) -> list[int]:
    """Return the ids of tokens that end a completion, ascending: those the file marks, and some of `NAMED_ENDS`."""
    names, types = header.fields[_TOKENS], header.fields.get(_TYPES, [])
    named = {name: token for token, (name, kind) in enumerate(zip(names, types, strict=False)) if kind == _CONTROL}
    not_ends = {name for marks, name in _NO_ENDS if marks <= named.keys()}
    marked = {header.fields[key] for key in _MARKED_ENDS if key in header.fields}
    return sorted(marked | {named[name] for name in (NAMED_ENDS & named.keys()) - not_ends})


def complete(model: Any, name: str) -> None:
    """Set a model's name and end tokens from its GGUF file."""
    model.config.name_or_path = name
    model.generation_config.eos_token_id = end_tokens(metadata(name))


def _settings(name: str) -> Path:
    """Return a folder with config and tokenizer of a GGUF file, made once; temporary if the cache can't be written."""
    header = metadata(name)
    try:
        kept = cache_folder() / "gguf" / f"{header.digest}-{transformers.__version__}-{_EDITION}"
        if kept.is_dir():
            return kept
        make_cache_folder("gguf")
    except UserError:  # a cache that can't be written
        kept = Path(_scratch().name) / header.digest
    with locked(Path(f"{kept}.lock"), f"waiting for another process that reads {name}", wait=True):
        if not kept.is_dir():
            with new_folder(kept) as scratch:
                _write_settings(name, header, scratch)
    return kept


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def _write_settings(name: str, header: Header, folder: Path) -> None:
    """Save config and tokenizer of a GGUF file in a folder; warn if the way it splits text is unknown."""
    file = Path(name)
    with quick_loader():
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kind, split = (header.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind == "gpt2":  # a byte-level BPE
        _restore_tokens(tokenizer, header)
    # The kind "llama" is sentencepiece's.
    token = header.fields.get("tokenizer.ggml.bos_token_id")
    begins = header.fields.get("tokenizer.ggml.add_bos_token", kind == "llama" or split in WITH_BOS)
    if begins and token is not None:
        bos = tokenizer.convert_ids_to_tokens(token)
        template = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, token)])
        tokenizer.backend_tokenizer.post_processor = template
    if kind == "gpt2":
        if split in SPLITS:
            set_split(tokenizer, split)
        else:
            told = "%s: its tokenizer.ggml.pre %s is not known here, so text may get other tokens than in llama.cpp"
            _log.warning(told, name, split)
    text = config.get_text_config()
    text.max_position_embeddings = header.fields[f"{header.architecture}.context_length"]
    set_rope(config, header)
    if text.num_hidden_layers == _GEMMA_27B.get(header.architecture):
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _restore_tokens(tokenizer: PreTrainedTokenizerBase, header: Header) -> None:
    """Give a byte-level BPE's control and user-defined tokens the texts of the file, and let it have no other tokens.

    transformers spells them in bytes if they are not ASCII, and adds tokens under ids that the model does not have.
    Unused tokens at the end, which make the vocabulary as large as the matrices, are dropped.
    """
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = made["model"]["vocab"]
    names, types = header.fields[_TOKENS], header.fields.get(_TYPES, [])
    count = len(names)
    while len(types) == len(names) and count and types[count - 1] == _UNUSED:
        count -= 1
    marks = {token: names[token] for token in range(count) if types[token : token + 1] in ([_CONTROL], [_USER_DEFINED])}
    made["model"]["vocab"] = {marks.get(token, text): token for text, token in vocabulary.items() if token < count}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    known = {added["id"]: added for added in made["added_tokens"] if added["id"] < count}
    known |= {
        token: {"id": token, "content": text, **plain, "special": types[token] == _CONTROL} | known.get(token, {})
        for token, text in marks.items()
    }
    made["added_tokens"] = [known[token] for token in sorted(known)]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(made))
