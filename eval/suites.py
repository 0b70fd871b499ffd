"""Suites (named sets of prompts) and the flags that select them."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.documents import RowError
from data.mixture import PYTHON_SOURCES, Mixture, mixture_of
from data.prompts import Cut, PromptLimits, conversations
from data.readers import is_recorded, raw_rows
from data.rows import content, errors_of_row
from data.tally import Tally
from speculator.chat import DATA_DAY
from speculator.decoding.sampling import Sampling
from speculator.errors import UserError, refuse, refuse_below
from speculator.prompts import KEYS, Conversation, log_first_turns, prompt_of, up_to_question
from speculator.target.base import PromptTarget

FILTERS = ("top_k", "top_p", "min_p")
_SHUFFLED = 10_000  # first rows of a source, out of which a suite takes some
_SUFFIXES = (".jsonl", ".txt", ".md", ".rst", ".py", ".gz")


@dataclass
class Suite:
    """Prompts with a name.

    Attributes:
        prompts: token ids, of a conversation those of the first turn.
        conversations: one per prompt; empty if the prompts are cut from text.
        left_out: number of prompts that do not fit the target's context together with their answer.
        ends: answers end by themselves, as of a chat, although `conversations` is empty.
    """

    name: str
    prompts: list[list[int]]
    conversations: list[Conversation] = field(default_factory=list)
    left_out: int = 0
    ends: bool = False

    @property
    def chat(self) -> bool:
        """True if answers have an end, as after a chat template; a text goes on, so its continuation is cut."""
        return self.ends or any(conversation.chat for conversation in self.conversations)

    def first(self, count: int) -> Suite:
        return replace(self, prompts=self.prompts[:count], conversations=self.conversations[:count])

    @property
    def digest(self) -> str:
        """Hash of all prompts and turns, 16 hexadecimal digits, which tells suites of one name in two reports apart."""
        later = [[message["content"] for turn in each.later for message in turn] for each in self.conversations]
        return hashlib.sha256(json.dumps([self.prompts, later]).encode()).hexdigest()[:16]

    @property
    def prompt_hashes(self) -> list[str]:
        """Hash of each prompt's tokens, 16 hexadecimal digits, by which `decoding.json` names what it was tuned on."""
        return [hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16] for prompt in self.prompts]

    @property
    def categories(self) -> list[str]:
        """Category of each prompt ("" if it has none)."""
        return [conversation.category for conversation in self.conversations] or [""] * len(self.prompts)


def load_suite(
    source: str,
    target: PromptTarget,
    *,
    prompt_tokens: int,
    max_prompts: int,
    max_new_tokens: int,
    raw: bool = False,
    split: str = "held-out",
) -> Suite:
    """Load the suite that the user named: python-sources, a local file or folder, or a hub dataset.

    Args:
        source: rows of `turns`, `messages`, `prompt` or `question` are prompts; text files, python-sources and rows
            of `text` are cut into prompts of `prompt_tokens`.
        max_prompts: limit of the suite. Of more rows it takes some at random, always the same ones. Categories take
            turns, but those of MT-bench share one turn if all eight are there.
        max_new_tokens: room in the context for an answer.
        raw: never apply the chat template.
        split: what to read of a source that has splits.

    Raises:
        UserError: the source can't be read, or none of its rows gives a prompt that fits the context.
    """
    if not source:
        raise UserError("--suite is empty; give a .jsonl or .txt file, a hub dataset or python-sources")
    # `limits` leave room for the answers, unless prompts are sources.
    if (start := len(target.start)) and start + max_new_tokens > target.context_length:
        raise UserError(
            f"prompts of {start} tokens and {max_new_tokens} new ones do not fit {target.name}, which has a context of "
            f"{target.context_length}"
        )
    tokenizer, limits = target.tokenizer, PromptLimits.of(target, max_new_tokens)
    if (raw or not target.continues) and tokenizer.chat_template is not None:
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = None

    def of_documents() -> Suite:
        suite = held_out(source, tokenizer, prompt_tokens, max_prompts, limits, split)
        return replace(suite, ends=suite.ends or not target.continues)

    if source == PYTHON_SOURCES or _is_document(source):
        return of_documents()
    rows, first = raw_rows(source), []
    for row in rows:  # up to the first row that can be parsed
        first.append(row)
        if row[2] is None:
            break
    refuse((not first, f"--suite {source}: no rows in it"))
    if _is_text(first[-1][1]):
        return of_documents()
    rows = chain(first, rows)
    some = list(islice(rows, _SHUFFLED))
    if len(some) > max_prompts:  # a file may be sorted
        Random(0).shuffle(some)
    chat, tally = tokenizer.chat_template is not None, Tally(max_share=1.0)
    wanted = _wanted(chain(some, rows), tokenizer, chat, max_prompts, limits, tally)
    taken, left_out = limits.take(source, _interleave(wanted), max_prompts)
    tally.take(len(taken), left_out, "--max_prompts")
    refuse((not taken, f"--suite {source}: no usable row in it; the first fault is {[*tally.first, 'none'][0]}"))
    tally.warn(f"--suite {source}")
    turns = not target.continues and any(conversation.later for conversation in taken)
    refuse((turns, f"--suite {source}: {target.name} answers one prompt, not the turns of a conversation"))
    return Suite(
        name=_name(source),
        prompts=[conversation.ids for conversation in taken],
        conversations=taken,
        left_out=left_out,
        ends=not target.continues,
    )


def _is_document(source: str) -> bool:
    """Return whether a source is (or, if missing, is named like) a text file or folder of documents, not of rows."""
    path = Path(source)
    if path.is_file():
        return not path.name.lower().removesuffix(".gz").endswith((".jsonl", ".json", ".parquet"))
    return path.is_dir() or source.startswith((".", "/")) or source.lower().endswith(_SUFFIXES) or "/" not in source


def _name(source: str) -> str:
    return Path(source).name if Path(source).exists() else source


def _is_text(row: Any) -> bool:
    """Return whether a row is text or tokens, so that its beginning becomes the prompt."""
    return isinstance(row, dict) and bool({"text", "input_ids"} & {*row}) and not any(key in row for key in KEYS)


def _prompt(where: str, row: Any, chat: bool) -> Conversation:
    """Return the prompt of a row. Messages after the user's last one are dropped: they are another model's answer.

    If `chat`, a chat gets the chat template. A UserError about a row without a prompt names its place, `where`.
    """
    refuse((_is_text(row), f'{where}: has "text" to cut a prompt from, but the first row is a prompt'))
    if isinstance(row, dict) and not any(row.get(key) is not None for key in KEYS):
        row = content(row, where)  # the other formats of chats
    prompt = prompt_of(where, row)
    messages = up_to_question(prompt.messages)
    refuse((not messages, f"{where}: no message of the user"))
    texts = [message.get("content") for turn in (messages, *prompt.later) for message in turn]
    refuse((any(isinstance(text, str) and not text.strip() for text in texts), f"{where}: a message is empty"))
    return replace(prompt, messages=messages, chat=prompt.chat and chat, today=DATA_DAY)


def _wanted(
    rows: Iterable[tuple[str, Any, str | None]],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    count: int,
    limits: PromptLimits,
    tally: Tally,
) -> Iterator[Conversation]:
    """Yield the prompts of usable rows, until `count` of each category fit.

    Prompts that do not fit are yielded too. Rows without categories are read no further than that; with categories all
    rows are read. Each of the `rows` is (place for errors, content, what is wrong with the row or None). If `chat`,
    chats get the chat template. `tally` counts all rows, and the unusable ones, which are skipped.
    """
    fitting: Counter[str] = Counter()
    for where, row, error in rows:
        tally.rows += 1
        try:
            with errors_of_row(where):
                refuse((error, f"{where}: {error}"))
                prompt = _prompt(where, row, chat)
                full = fitting[prompt.category] >= count
                prompt = prompt if full else replace(prompt, ids=prompt.tokens(tokenizer))
        except UserError as fault:
            text = str(fault).removeprefix(f"{where}: ")
            tally.add(fault if isinstance(fault, RowError) else RowError(where, text))
            continue
        if not full:
            yield prompt
            fitting[prompt.category] += limits.fits(prompt.ids)
        if fitting[""] >= count and len(fitting) == 1:
            return


_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def _interleave(prompts: Iterable[Conversation]) -> Iterator[Conversation]:
    """Yield the first prompt of every category, then the second of each, so that a short run covers all.

    The categories of MT-bench take turns as one: they are one of Spec-Bench's six tasks, which its authors weigh alike.
    """
    groups: dict[str, list[Conversation]] = {}
    for each in prompts:
        groups.setdefault(each.category, []).append(each)
    if groups.keys() >= _MT_BENCH:
        parts = [groups.pop(name) for name in list(groups) if name in _MT_BENCH]
        groups = {"": list(_in_turns(parts)), **groups}
    return _in_turns(groups.values())


def _in_turns(groups: Iterable[list[Conversation]]) -> Iterator[Conversation]:
    return (each for each in chain.from_iterable(zip_longest(*groups)) if each is not None)


def held_out(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    max_prompts: int,
    limits: PromptLimits | None = None,
    split: str = "held-out",
) -> Suite:
    """Return a suite of documents: of one split of python-sources and of recorded answers, or of a whole file.

    Args:
        prompt_tokens: length of the prompts that are cut from text.
        max_prompts: limit of the suite. Those of recorded answers are spread over the split, since requests that follow
            each other are alike.
        limits: leaves out prompts that do not fit the context.
        split: of python-sources and of recorded answers.
    """
    recorded, tally = is_recorded(Path(source)), Tally(max_share=1.0)
    suite = from_text(
        mixture_of([source]),
        tokenizer,
        prompt_tokens,
        None if recorded else max_prompts,
        split=split if recorded or source == PYTHON_SOURCES else None,
        limits=limits,
        tally=tally,
    )
    tally.warn(f"--suite {source}")
    count = len(suite.prompts)
    if recorded and count > max_prompts:
        suite.prompts = [suite.prompts[count * i // max_prompts] for i in range(max_prompts)]
    return suite


def from_text(
    mixture: Mixture,
    tokenizer: PreTrainedTokenizerBase,
    prompt_tokens: int,
    max_prompts: int | None,
    *,
    split: str | None,
    limits: PromptLimits | None = None,
    tally: Tally | None = None,
) -> Suite:
    """Return a suite of data sources: at most one prompt of each text, and chats up to the user's last message.

    Args:
        prompt_tokens: length of the prompts that are cut from text, special tokens included.
        max_prompts: limit of the suite; None: all.
        split: "validation" or "held-out", which training never uses; None uses every document.
        limits: leaves out prompts that do not fit the context.
        tally: counts unusable rows (default: the first one raises).
    """
    name = ", ".join(map(_name, mixture.locations))
    cut = Cut(prompt_tokens, last_turn=True)
    found, left_out = conversations(mixture, split, tokenizer, cut, max_prompts, limits=limits, tally=tally)
    if not found:
        fault = f"; the first bad row is {tally.first[0]}" if tally and tally.first else ""
        which = f"{split} document" if split else "document"
        raise UserError(f"no {which} of {name} has {prompt_tokens} tokens for a prompt{fault}")
    ids, ends = [prompt.ids for prompt in found], any(prompt.ends for prompt in found)
    return Suite(f"{name} ({split})" if split else name, ids, left_out=left_out, ends=ends)


def suite_of(
    arguments: argparse.Namespace, source: str, target: PromptTarget, raw: bool = False, split: str = "held-out"
) -> Suite:
    """Return the suite `source`, as `load_suite` does, with the sizes in the flags of a command."""
    sizes = {name: getattr(arguments, name) for name in ("prompt_tokens", "max_prompts", "max_new_tokens")}
    return load_suite(source, target, **sizes, raw=raw, split=split)


def first_turns(
    arguments: argparse.Namespace, source: str, target: PromptTarget, raw: bool = False, split: str = "held-out"
) -> Suite:
    """Return a suite as `suite_of` does, for a command that asks first turns only, and say how many it leaves out."""
    suite = suite_of(arguments, source, target, raw, split)
    log_first_turns(suite.name, suite.conversations)
    return suite


def sampling_of(arguments: argparse.Namespace, temperature: float) -> Sampling:
    """Return the settings of sampling that a command's flags ask for, as far as it has them, at one temperature."""
    filters = {name: value for name in FILTERS if (value := getattr(arguments, name, None)) is not None}
    return Sampling(temperature, seed=getattr(arguments, "seed", 0), **filters)


def check_flags(arguments: argparse.Namespace) -> None:
    """Raise a UserError for a wrong count or temperature in the shared flags, or a value that is given twice."""
    refuse_below(arguments, max_prompts=1, prompt_tokens=1, max_new_tokens=2)
    given = vars(arguments)
    for temperature in given.get("temperature") or [1.0]:
        sampling_of(arguments, temperature)
    for name in ("rate", "price"):
        refuse(((given.get(name) or 1.0) <= 0 or given.get(name) == 0, f"--{name} must be above 0"))
    for name in ("batch_size", "num_speculative_tokens", "repeats", "clients"):
        value = given.get(name)
        least = min(value, default=1) if isinstance(value, list) else 1 if value is None else value
        refuse((least < 1, f"--{name} must be at least 1"))
    for name in ("temperature", "batch_size", "num_speculative_tokens", "clients"):
        value = given.get(name)
        refuse((isinstance(value, list) and len(set(value)) < len(value), f"--{name}: a value is given twice"))


def check_names(suites: Sequence[Suite]) -> None:
    """Raise a UserError if two suites have the same name."""
    names = [suite.name for suite in suites]
    for name in names:
        refuse((names.count(name) > 1, f"two suites are called {name}; rename a file"))


def check_rows(rows: int, count: int) -> None:
    """Raise a UserError if a batch has more rows than there are prompts."""
    refuse((rows > count, f"--batch_size {rows} is more than the {count} prompts of --max_prompts"))
