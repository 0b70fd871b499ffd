"""What to decode: named sets of prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from data.sources import documents
from speculator.errors import UserError


@dataclass
class Suite:
    """Prompts with a name, as token ids."""

    name: str
    prompts: list[list[int]]


def held_out(
    sources: list[str], tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, max_prompts: int, *, split: str
) -> Suite:
    """The beginnings of lines in documents that training never saw: one window per document.

    Args:
        sources: as `data.sources.documents` takes them.
        prompt_tokens: the length of every prompt.
        max_prompts: how many.
        split: "validation" while training, "held-out" for a report.

    Raises:
        UserError: no document is long enough.
    """
    prompts: list[list[int]] = []
    for source in sources:
        for row in documents(source, split):
            lines = row["text"].splitlines(keepends=True)
            # Where in the document: a function of its id, so the same prompt everywhere.
            start = int.from_bytes(hashlib.sha256(f"start of {row['id']}".encode()).digest()[:8], "big") % len(lines)
            text = "".join(lines[start:])[: prompt_tokens * 16]
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= prompt_tokens:
                prompts.append(ids[:prompt_tokens])
            if len(prompts) == max_prompts:
                return Suite(f"{split} text", prompts)
    if not prompts:
        raise UserError(f"no {split} document of {', '.join(sources)} has {prompt_tokens} tokens for a prompt")
    return Suite(f"{split} text", prompts)
