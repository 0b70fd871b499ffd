"""What to decode: named sets of prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.sources import PYTHON_SOURCES, documents
from speculator.errors import UserError, check_text


@dataclass
class Suite:
    """Prompts with a name, as token ids."""

    name: str
    prompts: list[list[int]]


def held_out(source: str, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, max_prompts: int) -> Suite:
    """What a head is measured on: the held-out split of python-sources, or all documents of a file.

    Raises:
        UserError: as `from_text`, or an empty name.
    """
    if not source:
        raise UserError("--suite is empty: give a .jsonl or .txt file, or python-sources")
    split = "held-out" if source == PYTHON_SOURCES else None
    return from_text([source], tokenizer, prompt_tokens, max_prompts, split=split)


def from_text(
    sources: list[str],
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    max_prompts: int,
    *,
    split: str | None,
    max_package_bytes: int = 2_000_000,
) -> Suite:
    """Prompts cut from text: in each document, `prompt_tokens` tokens from the beginning of some line.

    Args:
        sources: as `data.sources.documents` takes them.
        prompt_tokens: the length of every prompt, what the tokenizer puts in front included.
        max_prompts: at most one a document, and no more than this.
        split: "validation" or "held-out", which training never sees; None takes every document.
        max_package_bytes: as the training used it.

    Raises:
        UserError: no document is long enough, or one holds what is no text; a length that is not positive.
    """
    if prompt_tokens < 1 or max_prompts < 1:
        raise UserError("prompt_tokens and max_prompts must be at least 1")
    name = ", ".join(Path(source).name for source in sources)
    prompts: list[list[int]] = []
    for row in documents(sources, split, max_package_bytes=max_package_bytes):
        lines = row["text"].splitlines(keepends=True)
        # Where in the document: a function of its id, so the same prompt everywhere.
        start = int.from_bytes(hashlib.sha256(f"start of {row['id']}".encode()).digest()[:8], "big") % len(lines)
        text = "".join(lines[start:])[: prompt_tokens * 16]
        check_text(row["id"], text)
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) >= prompt_tokens:
            prompts.append(ids[:prompt_tokens])
        if len(prompts) == max_prompts:
            break
    if not prompts:
        raise UserError(f"no {split or ''} document of {name} has {prompt_tokens} tokens for a prompt")
    return Suite(f"{name} ({split})" if split else name, prompts)
