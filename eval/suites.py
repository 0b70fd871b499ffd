"""What to decode: named sets of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.sources import PYTHON_SOURCES, parse, prompts
from speculator.errors import UserError


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
    """Prompts of sources, as `data.sources.prompts` makes them: cuts of texts, the openings of chats.

    Args:
        sources: as `data.sources` spells them.
        prompt_tokens: the length of those cut from text, what the tokenizer puts in front included.
        max_prompts: at most one a document, and no more than this.
        split: "validation" or "held-out", which training never sees; None takes every document.
        max_package_bytes: as the training used it.

    Raises:
        UserError: no document is long enough, or one holds what is no text; a length that is not positive.
    """
    if prompt_tokens < 1 or max_prompts < 1:
        raise UserError("prompt_tokens and max_prompts must be at least 1")
    name = ", ".join(Path(source.location).name for source in parse(sources))
    found = prompts(sources, split, tokenizer, prompt_tokens, max_prompts, max_package_bytes=max_package_bytes)
    if not found:
        raise UserError(f"no {split or ''} document of {name} has {prompt_tokens} tokens for a prompt")
    return Suite(f"{name} ({split})" if split else name, found)
