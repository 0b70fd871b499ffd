"""What to decode: named sets of prompts, and the flags that say how many and how long."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.prompts import Room, prompts
from data.readers import raw_rows
from data.sources import PYTHON_SOURCES, parse
from data.tally import Tally
from speculator.chat import DATA_DAY
from speculator.cli import drafting
from speculator.decoding.sampling import Sampling
from speculator.errors import OneLineParser, UserError, refuse, refuse_below
from speculator.prompts import KEYS, Prompt, prompt_of
from speculator.target.model import Target

_SUFFIXES = (".jsonl", ".txt", ".md", ".rst", ".py", ".gz")


@dataclass
class Suite:
    """Prompts with a name.

    Attributes:
        prompts: token ids, of the first turn where there are more.
        conversations: one for each prompt, or none at all where the prompts are text cut somewhere.
        left_out: prompts that were passed over because they and their answer do not fit the target's context.
        ends: answers have an end of their own, though there are no conversations.
    """

    name: str
    prompts: list[list[int]]
    conversations: list[Prompt] = field(default_factory=list)
    left_out: int = 0
    ends: bool = False

    @property
    def chat(self) -> bool:
        """Some answer has an end of its own, as behind a chat template; a text to continue just goes on."""
        return self.ends or any(talk.chat for talk in self.conversations)

    def first(self, count: int) -> Suite:
        """The first few prompts of it."""
        return replace(self, prompts=self.prompts[:count], conversations=self.conversations[:count])

    @property
    def categories(self) -> list[str]:
        """Of each prompt; "" where it has none."""
        return [talk.category for talk in self.conversations] or [""] * len(self.prompts)


def load_suite(
    source: str, target: Target, *, prompt_tokens: int, max_prompts: int, max_new_tokens: int, raw: bool = False
) -> Suite:
    """A suite by what the user typed: python-sources, a local file or folder, or a hub dataset.

    Args:
        source: rows of `text`, .txt files and python-sources are cut into prompts of `prompt_tokens`; rows of `turns`,
            `messages`, `prompt` or `question` are the prompts.
        target: its tokenizer and context.
        prompt_tokens: of prompts cut from text.
        max_prompts: no more than this; shared among the categories, each in its own order.
        max_new_tokens: the room that an answer needs.
        raw: no chat template, even where the tokenizer has one.

    Raises:
        UserError: no such source, a malformed row, no row at all, or none that fits the context.
    """
    if not source:
        raise UserError("--suite is empty: give a .jsonl or .txt file, a hub dataset or python-sources")
    tokenizer, room = target.tokenizer, Room(target.name, target.context_length, max_new_tokens)
    if source == PYTHON_SOURCES or _is_document(source):
        return held_out(source, tokenizer, prompt_tokens, max_prompts, room)
    rows = list(raw_rows(source))
    if not rows:
        raise UserError(f"--suite {source}: no rows in it")
    if _is_text(rows[0][1]):
        return held_out(source, tokenizer, prompt_tokens, max_prompts, room)
    chat = not raw and tokenizer.chat_template is not None
    talks = _in_turns(_asked(where, row, chat) for where, row in rows)
    taken, left_out = room.take(source, ((talk.tokens(tokenizer), talk) for talk in talks), max_prompts)
    return Suite(Path(source).name, [ids for ids, _ in taken], [talk for _, talk in taken], left_out)


def _is_document(source: str) -> bool:
    """A local file or folder of documents to cut prompts from, not a .jsonl file of rows.

    A name that is not there and looks like a file's is one too: the reader of documents says that it is not there.
    """
    path = Path(source)
    if path.is_file():
        return not path.name.removesuffix(".gz").endswith(".jsonl")
    return path.is_dir() or source.startswith((".", "/")) or source.endswith(_SUFFIXES) or "/" not in source


def _is_text(row: Any) -> bool:
    """Whether prompts are cut from a row: it has a text, and asks nothing."""
    return isinstance(row, dict) and "text" in row and not any(key in row for key in KEYS)


def _asked(where: str, row: Any, chat: bool) -> Prompt:
    """What a row asks: of messages those up to the user's last, since after it comes the answer of some other model."""
    refuse((_is_text(row), f'{where}: "text" to cut a prompt from, among rows that are prompts'))
    asked = prompt_of(where, row)
    roles = [message.get("role") for message in asked.messages]
    refuse(("user" not in roles, f"{where}: a chat in which the user asks nothing"))
    messages = asked.messages[: len(roles) - roles[::-1].index("user")]
    texts = [message.get("content") for message in messages] + asked.later
    refuse((any(isinstance(text, str) and not text.strip() for text in texts), f"{where}: a text to ask is empty"))
    return replace(asked, messages=messages, chat=asked.chat and chat, today=DATA_DAY)


def _in_turns(talks: Iterable[Prompt]) -> Iterator[Prompt]:
    """The first of every category, then the second of each: a short run sees all of them."""
    groups: dict[str, list[Prompt]] = {}
    for talk in talks:
        groups.setdefault(talk.category, []).append(talk)
    return (talk for talk in chain.from_iterable(zip_longest(*groups.values())) if talk is not None)


def held_out(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    max_prompts: int,
    room: Room | None = None,
) -> Suite:
    """What a head is measured on: the held-out split of python-sources, or all documents of a file.

    Raises:
        UserError: as `from_text`.
    """
    split = "held-out" if source == PYTHON_SOURCES else None
    return from_text([source], tokenizer, prompt_tokens, max_prompts, split=split, room=room)


def from_text(
    sources: list[str],
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    max_prompts: int,
    *,
    split: str | None,
    room: Room | None = None,
    max_package_bytes: int = 2_000_000,
    tally: Tally | None = None,
) -> Suite:
    """Prompts of sources, as `data.prompts` makes them: cuts of texts, chats up to the user's last turn.

    Args:
        sources: as `data.sources` spells them.
        prompt_tokens: the length of those cut from text, what the tokenizer puts in front included.
        max_prompts: at most one a document, and no more than this.
        split: "validation" or "held-out", which training never sees; None takes every document.
        room: prompts that it does not have are left out.
        max_package_bytes: as the training used it.
        tally: counts rows that can't be used; without it the first is raised.

    Raises:
        UserError: no document is long enough, none fits, or one holds what is no text; a length that is not positive.
    """
    if prompt_tokens < 1 or max_prompts < 1:
        raise UserError("prompt_tokens and max_prompts must be at least 1")
    name = ", ".join(Path(source.location).name for source in parse(sources))
    found = prompts(
        sources,
        split,
        tokenizer,
        prompt_tokens,
        max_prompts,
        last_turn=True,
        room=room,
        max_package_bytes=max_package_bytes,
        tally=tally,
    )
    if not found:
        raise UserError(f"no {f'{split} ' if split else ''}document of {name} has {prompt_tokens} tokens for a prompt")
    return Suite(f"{name} ({split})" if split else name, found, left_out=found.left_out, ends=found.ends)


def add_flags(parser: OneLineParser, max_prompts: int) -> None:
    """The flags of every measurement: a target, and how much it is asked."""
    drafting.add_target_flags(parser)
    parser.add_argument("--max_prompts", type=int, default=max_prompts, help=f"of each suite; default: {max_prompts}")
    parser.add_argument("--prompt_tokens", type=int, default=64, help="of prompts that are cut from text; default: 64")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="per prompt and turn; default: 128")


def suite_of(arguments: argparse.Namespace, source: str, target: Target, raw: bool = False) -> Suite:
    """`load_suite` with the sizes that the flags give."""
    sizes = {name: getattr(arguments, name) for name in ("prompt_tokens", "max_prompts", "max_new_tokens")}
    return load_suite(source, target, **sizes, raw=raw)


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse what can't be, before any model is loaded: of the flags that measurements share.

    Raises:
        UserError: a count or temperature is out of range, or given twice.
    """
    refuse_below(arguments, max_prompts=1, prompt_tokens=1, max_new_tokens=2)
    given = vars(arguments)
    for temperature in given.get("temperature") or []:
        Sampling(temperature)
    for name in ("batch_size", "num_speculative_tokens", "repeats"):
        value = given.get(name)
        least = min(value, default=1) if isinstance(value, list) else 1 if value is None else value
        refuse((least < 1, f"--{name} must be at least 1"))
    for name in ("temperature", "batch_size", "num_speculative_tokens"):
        value = given.get(name)
        refuse((isinstance(value, list) and len(set(value)) < len(value), f"--{name}: one value is given twice"))


def check_rows(rows: int, texts: int) -> None:
    """Refuse a batch of more rows than there are prompts.

    Raises:
        UserError: `rows` is more than `texts`.
    """
    refuse((rows > texts, f"--batch_size {rows}: more rows than the {texts} prompts of --max_prompts"))


def check_lengths(target: Target, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse texts that can't be timed, or do not fit the target.

    Raises:
        UserError: fewer than 2 new tokens, or more than the context has room for.
    """
    if max_new_tokens < 2:
        raise UserError("max_new_tokens must be at least 2: the first new token is the prefill's")
    if prompt_tokens + max_new_tokens > target.context_length:
        raise UserError(
            f"prompts of {prompt_tokens} tokens and {max_new_tokens} new ones do not fit {target.name}, which has a "
            f"context of {target.context_length}"
        )
