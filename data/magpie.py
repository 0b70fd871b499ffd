"""The source `self`: the target writes what a user would ask it, then answers (Magpie, arXiv 2406.08464).

Given its chat template up to where the user speaks, an aligned model goes on as the user. What stands before, between
and after the turns is found by rendering a chat of marks. A target without a template begins a text, and continues it.

Longer than other files: half of it is what a chat template writes around a turn, found and checked by rendering.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.batches import Batches
from data.duplicates import NearDuplicates
from data.onpolicy import BATCH_SIZE, ON_POLICY, Ends, generate_rows, identity, settings_of
from data.sources import parse
from speculator.chat import DATA_DAY, chat_text, chat_tokens
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter
from speculator.errors import UserError, refuse
from speculator.files import read_text
from speculator.target.model import Target

SELF = "self"
"""This source's name."""
ROWS = 4000
"""So many chats, if nobody says how many."""
ASKING = Sampling(temperature=1.0, top_p=0.99)
_MARKS = ("MARKofUSERone", "MARKofANSWER", "MARKofUSERtwo")
_LOOP, _LOOPING, _LONG = 4, 0.5, 12  # a text loops if more than this share of its (many) runs of 4 tokens came before
_PASS_FACTS = ("drafter", "rows", "tokens", "acceptance_length", "tokens_per_second", "seconds")
_STREAMS = 1 << 40  # apart lie the seeds of two passes: a row's first token would draw the same in both


def only_self(sources: Sequence[str]) -> bool:
    """Whether the target's own chats are all that there is."""
    return [source.location for source in parse(sources)] == [SELF]


def names_self(sources: Sequence[str]) -> bool:
    """Whether the target's own chats are among some sources."""
    return any(source.location == SELF for source in parse(sources))


def asking_of(temperature: float, top_p: float, where: str) -> Sampling:
    """How the user's turns are drawn, by two settings whose names begin with `where` and "prompt_".

    Raises:
        UserError: one of them can't be.
    """
    try:
        return Sampling(temperature, top_p=top_p)
    except UserError as error:
        raise UserError(f"{where}prompt_{error}") from None


@dataclass(frozen=True)
class Turns:
    """What a chat template writes around the turns of a user and an assistant.

    Attributes:
        before: in front of the user's first turn.
        ask: between the user's first turn and the answer.
        again: between an answer and the user's next turn.
        ask_again: between that and its answer.
    """

    before: str
    ask: str
    again: str = ""
    ask_again: str = ""


def turns_of(tokenizer: PreTrainedTokenizerBase, several: bool = False) -> Turns | None:
    """What the tokenizer's template writes around turns; with `several`, around the second one too. None without one.

    Raises:
        UserError: the template does not write a user's turn once and as it is.
    """
    if not tokenizer.chat_template:
        return None
    first = _around(tokenizer, 1)
    return Turns(*first, *_around(tokenizer, 3)[2:]) if several else Turns(*first)


def _around(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS[:count], strict=False)]
    text = chat_text(tokenizer, messages, ask=True, today=DATA_DAY)
    parts = re.split("|".join(_MARKS[:count]), text)
    if len(parts) != count + 1 or re.findall("|".join(_MARKS), text) != list(_MARKS[:count]):
        raise UserError(
            f"the chat template of {tokenizer.name_or_path} does not write each turn once and as it is, so the source "
            f"{SELF} can't tell where the user speaks"
        )
    return parts


def self_rows(
    target: Target,
    drafter: Drafter | None,
    folder: str | Path,
    *,
    rows: int,
    turns: int = 1,
    asking: Sampling = ASKING,
    max_prompt_tokens: int = 256,
    answering: Sampling | Sequence[Sampling] = ON_POLICY,
    max_new_tokens: int = 256,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: bool = True,
    keep_refused: bool = False,
    after: Path | None = None,
) -> Dataset:
    """Let the target write chats: a user's turn, its answer, and so on.

    Of the user's turns are dropped, and counted: what does not end within `max_prompt_tokens`, is empty, loops, spells
    special tokens, leaves no room in the context, or, at the beginning of a chat, is much like one before. A later turn
    that is dropped ends its chat. Each pass over the rows is made as `generate_rows` makes it: in pieces, resumable, by
    all processes of a launch.

    Args:
        target: who writes.
        drafter: who proposes; None decodes plainly.
        folder: where rows and manifest come to lie; a source like any other.
        rows: chats that are begun; fewer are left.
        turns: of the user in a chat, at most.
        asking: how the user's turns are drawn; its seed is not used.
        max_prompt_tokens: the most tokens of a user's turn. A target without a chat template begins with so many.
        answering: how the answers are drawn; of several the rows take each in turn.
        max_new_tokens: the most tokens of an answer; one that does not end within them ends its chat.
        batch_size, seed, progress, keep_refused: as for `generate_rows`.
        after: folder of chats that were written before; a prompt much like one of theirs is dropped.

    Returns:
        Rows {"input_ids", "loss_mask": 1 on the answers}, with `keep_refused` also "refused". Beside them
        manifest.json: the settings, "rows", "tokens": those of the answers, "dropped": why and how often, "seconds":
        those of the passes; with a drafter "plain_seconds": about as long it would
        have taken without, by the passes' own clocks; in "passes" of the manifest of each pass; with `after` in
        "before" what its chats took.

    Raises:
        UserError: nothing to begin with, no turn that can be used, or as `generate_rows`.
    """
    longest = max_prompt_tokens + max_new_tokens
    refuse(
        (rows < 1, f"{rows} rows are not at least 1"),
        (turns < 1, f"{turns} turns are not at least 1"),
        (
            longest > target.context_length,
            f"prompts of {max_prompt_tokens} and answers of {max_new_tokens} tokens do not fit {target.name}, with "
            f"a context of {target.context_length}",
        ),
    )
    answers = [answering] if isinstance(answering, Sampling) else list(answering)
    writer = _Writer(target, turns, max_prompt_tokens, max_new_tokens)
    before = writer.remember(after) if after else None
    record = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target.dtype),
        "drafter": identity(drafter),
        "begun": rows,
        "turns": turns,
        "asking": settings_of(asking),
        "max_prompt_tokens": max_prompt_tokens,
        "answering": [settings_of(each) for each in answers],
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "template": writer.template,
        **({"keep_refused": True} if keep_refused else {}),
        **({"after": before} if before else {}),
    }
    work = Batches(Path(folder), record, [], progress=False)
    if target.broadcast_object(work.finished):
        return work.conclude(lambda: ([], {}))
    passes: list[dict[str, Any]] = []

    def write(what: str, prompts: list[list[int]], how: Sequence[Sampling], count: int, ends: Ends | None):
        where = work.begin() / f"{len(passes) + 1}-{what}"
        own = {"sampling": how, "max_new_tokens": count, "seed": seed + len(passes) * _STREAMS, "ends": ends}
        own["keep_refused"] = keep_refused and ends is None
        shown = {"progress": progress, "title": what}
        made = generate_rows(target, drafter, prompts, where, batch_size=batch_size, **own, **shown)
        manifest = json.loads(read_text(where / "manifest.json"))
        passes.append({"what": what, **{key: manifest[key] for key in _PASS_FACTS if key in manifest}})
        rows = list(zip(made, map(len, prompts), strict=True))
        refused = [row["refused"][length:] if own["keep_refused"] else [] for row, length in rows]
        return [row["input_ids"][length:] for row, length in rows], refused

    chats = going = [_Chat() for _ in range(rows)]
    dropped: Counter[str] = Counter()
    while going and len(passes) < 2 * turns:
        turn, _ = write("prompts", [writer.begin(chat) for chat in going], [asking], max_prompt_tokens, writer.ends)
        faults = [writer.ask(chat, tokens) for chat, tokens in zip(going, turn, strict=True)]
        dropped.update(fault for fault in faults if fault)
        asked = [chat for chat, fault in zip(going, faults, strict=True) if not fault]
        if not asked:
            break
        answered = write("answers", [chat.ids for chat in asked], answers, max_new_tokens, None)
        for chat, tokens, refused in zip(asked, *answered, strict=True):
            chat.add(tokens, 1, refused)
        going = [chat for chat in asked if chat.ids[-1] in target.eos_token_ids and writer.has_room(chat)]
    whole = [chat for chat in chats if chat.ids]
    refuse((not whole, f"{target.name}: of {rows} prompts that it wrote none can be used: {_listed(dropped)}"))
    facts = {
        "rows": len(whole),
        "tokens": sum(sum(chat.mask) for chat in whole),
        "dropped": dict(dropped.most_common()),
        "seconds": sum(each["seconds"] for each in passes),
        "passes": passes,
    }
    if drafter:
        facts["plain_seconds"] = sum(each["seconds"] * _gain(each["tokens_per_second"]) for each in passes)
    if after:
        manifest = json.loads(read_text(after / "manifest.json"))
        facts["before"] = {key: manifest[key] for key in ("rows", "tokens", "seconds")}
    return work.conclude(lambda: ((chat.row(keep_refused) for chat in whole), facts))


def _gain(clocks: dict[str, float | None]) -> float:
    """How many times as fast drafting is; 1 where that was not clocked."""
    drafted, plain = clocks["speculative"], clocks["plain"]
    return drafted / plain if drafted and plain else 1.0


def summary(folder: Path) -> str:
    """What `self_rows` left in a folder, in a line."""
    manifest = json.loads(read_text(folder / "manifest.json"))
    rows = f"{folder}: {manifest['rows']:,} rows, {manifest['tokens']:,} new tokens, {manifest['seconds']:,.0f} s"
    if "plain_seconds" in manifest:
        rows += f" (about {manifest['plain_seconds']:,.0f} s without drafting)"
    why = _listed(Counter(manifest["dropped"])) or "none"
    return f"{rows}; of {manifest['begun']:,} prompts that the target wrote were dropped: {why}"


def _listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {fault}" for fault, count in dropped.most_common())


class _Chat:
    """Tokens so far, which of them are to be learnt, and which took a refused draft's place."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.refused: list[int] = []

    def add(self, ids: list[int], learnt: int, refused: list[int] | None = None) -> None:
        self.ids += ids
        self.mask += [learnt] * len(ids)
        self.refused += refused or [0] * len(ids)

    def row(self, keep_refused: bool) -> dict[str, list[int]]:
        row = {"input_ids": self.ids, "loss_mask": self.mask}
        return row | ({"refused": self.refused} if keep_refused else {})


class _Writer:
    """Where the user speaks, where the turn ends, and whether it can be used.

    Attributes:
        template: what stands around the turns; without a chat template the tokens that a text begins with.
        ends: what ends a user's turn; None for a target without a chat template, which continues what it began.
    """

    def __init__(self, target: Target, turns: int, max_prompt_tokens: int, max_new_tokens: int):
        self.tokenizer = tokenizer = target.tokenizer
        self._turns = turns_of(tokenizer, turns > 1)
        self._special = {*tokenizer.added_tokens_decoder, *target.eos_token_ids}
        self._most, self._room = max_prompt_tokens, target.context_length - max_new_tokens
        self._seen = NearDuplicates()
        self.ends: Ends | None = None
        if self._turns is None:
            single = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
            self._first = tokenizer("", verbose=False)["input_ids"] or single
            refuse(
                (not self._first, f"{target.name}: no chat template and no token to begin a text with"),
                (turns > 1, f"{target.name}: no chat template, so no chats of {turns} turns"),
            )
            self.template: Any = self._first
            return
        self.template = asdict(self._turns)
        ask = [token for token in chat_tokens(self._turns.ask, tokenizer) if tokenizer.decode([token]).strip()]
        if ask and ask[0] in tokenizer.added_tokens_decoder:
            self.ends = Ends(sorted({ask[0], *target.eos_token_ids}))
        else:  # plain words, such as "ASSISTANT:"
            words = self._turns.ask.strip().splitlines()[:1]
            self.ends = Ends(sorted(target.eos_token_ids), words)
        refuse(
            (
                not (self.ends.eos_token_ids or self.ends.stop_strings),
                f"{target.name}: its chat template writes nothing between a user's turn and the answer",
            )
        )

    def remember(self, folder: Path) -> str:
        """Take the first prompts of chats in a folder for written; gives their hash."""
        texts = []
        for row in Dataset.load_from_disk(str(folder / "rows")):
            ids = row["input_ids"][0 if self._turns else len(self._first) : row["loss_mask"].index(1)]
            text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            if self._turns:
                text = text.removeprefix(self._turns.before).partition(self._turns.ask)[0]
            self._seen.add(text)
            texts.append(text)
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

    def begin(self, chat: _Chat) -> list[int]:
        """The chat up to where the user speaks."""
        if self._turns is None:
            return self._first
        # A model that is given the last space does not write the word after it.
        lead = (self._turns.again if chat.ids else self._turns.before).rstrip(" ")
        return chat.ids + self._following(chat, lead)

    def has_room(self, chat: _Chat) -> bool:
        """Whether the user can speak again."""
        return len(self.begin(chat)) < self._room

    def _following(self, chat: _Chat, text: str) -> list[int]:
        """Tokens of what follows in a chat, whose answer may have written the first of them."""
        tokens = chat_tokens(text, self.tokenizer)
        return tokens[1:] if chat.ids and tokens[:1] == chat.ids[-1:] else tokens

    def ask(self, chat: _Chat, tokens: list[int]) -> str | None:
        """Add a user's turn to a chat, up to where it is answered; gives why it was dropped, if it was."""
        text, ended = self._read(tokens)
        if self._turns is None:
            following = [*self._first, *tokens]
        elif chat.ids:
            following = self._following(chat, self._turns.again + text + self._turns.ask_again)
        else:
            following = chat_tokens(self._turns.before + text + self._turns.ask, self.tokenizer)
        body = tokens[:-1] if tokens[-1] in self._special else tokens
        if ended != (self._turns is not None):
            return f"not ended within {self._most} tokens" if self._turns else f"ended within {self._most} tokens"
        if not re.search(r"\w", text):
            return "empty"
        if self._special.intersection(body):
            return "with special tokens in it"
        if loops(body):
            return "looping"
        if len(chat.ids) + len(following) > self._room:
            return "without room for an answer"
        if not chat.ids and self._seen.add(text):
            return "much like another"
        chat.add(following, 0)
        return None

    def _read(self, tokens: list[int]) -> tuple[str, bool]:
        """The text of a turn, and whether it has ended."""
        ends = self.ends or Ends([])
        ended = tokens[-1] in {*ends.eos_token_ids, *self._special}
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens, clean_up_tokenization_spaces=False)
        for string in ends.stop_strings:
            text, found, _ = text.partition(string)
            ended |= bool(found)
        return text.strip(), ended


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text mostly repeats itself: more than half of its runs of four tokens came before in it."""
    runs = list(zip(*(tokens[i:] for i in range(_LOOP)), strict=False))
    return len(runs) >= _LONG and len(set(runs)) < (1 - _LOOPING) * len(runs)
