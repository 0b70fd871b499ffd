"""The source `self`: the target writes user turns and answers them (Magpie, arXiv 2406.08464).

Given its chat template up to where the user speaks, an aligned model continues as the user. A target without a chat
template begins a text and continues it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from data.batches import Batches
from data.chat_turns import UserTurns
from data.conversations import Row
from data.tally import cut_answers
from data.writers.base import Writer, settings_of
from data.writers.engine import identity
from data.writing import Writing
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.errors import UserError, refuse
from speculator.files import JsonObject, read_json
from speculator.prompts import Conversation
from speculator.target.base import TrainingTarget

ROWS = 4000
"""Default number of chats."""
PROMPT_SAMPLING = Sampling(temperature=1.0, top_p=0.99)
_PASS_FACTS = ("drafter", "rows", "tokens", "acceptance_length", "tokens_per_second", "seconds", "models")
_ANSWER_FACTS = ("answers", "cut")
FAILED = "failed"
_SEED_STRIDE = 1 << 40  # between passes: otherwise both would draw a row's first token alike
_SEED_BITS = 20
"""All chats begin with the same prompt, and row r has seed + r: neighbouring seeds are this many bits apart."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How the target writes user turns.

    Attributes:
        turns: largest number of user turns in a chat.
        sampling: temperature and filters; the seed is ignored.
        max_prompt_tokens: largest length of a user turn; without a chat template the length of every prompt.
    """

    rows: int
    turns: int = 1
    sampling: Sampling = PROMPT_SAMPLING
    max_prompt_tokens: int = 256


def self_rows(
    target: TrainingTarget,
    writer: Writer,
    folder: str | Path,
    asking: Asking,
    writing: Writing,
    *,
    previous: Path | None = None,
) -> Dataset:
    """Let the target write chats: a user turn, its answer, and so on.

    A user turn is dropped, and counted, if it does not end within `max_prompt_tokens`, is empty or repetitive, contains
    special tokens, or leaves no room in the context. A first turn is also dropped if it nearly duplicates an earlier
    one. Dropping a later turn ends its chat, and a turn whose answer failed is dropped as well. Each pass over the
    chats is a resumable call of `Writer.write`.

    Args:
        folder: the output, a source like any other.
        writing: how it answers them; an answer that is cut ends its chat.
        previous: folder of earlier chats; near-duplicates of their first turns are dropped too.

    Returns:
        Rows {"input_ids", "loss_mask": 1 on the answers}. manifest.json holds the
        settings, "rows", "tokens" (of the answers), "answers", "cut" (see `Batches.finish`), "dropped" (counts by
        reason), "seconds", and "passes": facts from the manifest of each pass.

    Raises:
        UserError: no user turn can be used, or the folder was made with other settings.
    """
    context = writer.shortest_context()
    longest = asking.max_prompt_tokens + writing.max_new_tokens
    refuse(
        (abs(writing.seed) >> 42, f"the source self: the seed {writing.seed} has more than 42 bits"),
        (
            longest > context,
            f"prompts of {asking.max_prompt_tokens} and answers of {writing.max_new_tokens} tokens do not fit "
            f"{target.name}, with a context of {context}",
        ),
    )
    users = UserTurns(target, asking.turns, asking.max_prompt_tokens, writing.max_new_tokens, context)
    seen = users.add_seen(previous) if previous else None
    record: JsonObject = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target.dtype),
        "drafter": identity(writer.drafter),
        "begun": asking.rows,
        "turns": asking.turns,
        "asking": settings_of(asking.sampling),
        "max_prompt_tokens": asking.max_prompt_tokens,
        "answering": [settings_of(each) for each in writing.samplings],
        "max_new_tokens": writing.max_new_tokens,
        "seed": writing.seed,
        "template": users.template,
        **({"after": seen} if seen else {}),
    }
    with Batches(Path(folder), record, [], notes=writer.notes(Path(folder))) as work:
        if work.finished:
            return work.conclude(lambda: ([], {}))
        passes: list[Any] = []
        counts: Counter[str] = Counter()

        def write(what: str, prompts: list[list[int]], how: Writing) -> list[list[int] | None]:
            """Return each prompt's new tokens, None if it failed; `what` names the folder; each call moves the seed."""
            output = work.begin() / f"{len(passes) + 1}-{what}"
            how = replace(how, seed=(how.seed << _SEED_BITS) + len(passes) * _SEED_STRIDE)
            chats = [Conversation(each, completion=users.ends is not None) for each in prompts]
            # From the second turn on the chats are whole without this pass.
            rows = writer.write(chats, output, how, title=what, may_be_empty=len(passes) > 1)
            manifest = read_json(output / "manifest.json")
            passes.append({"what": what, **{key: manifest[key] for key in _PASS_FACTS if key in manifest}})
            if what == "answers":
                counts.update({name: manifest[name] for name in _ANSWER_FACTS})
            # A prompt that failed has no row. Equal prompts, as all first ones are, may take each other's rows.
            written: dict[tuple[int, ...], list[list[int]]] = {}
            for row in rows:
                start = row["loss_mask"].index(1)
                written.setdefault(tuple(row["input_ids"][:start]), []).append(row["input_ids"][start:])
            found = (written.get(tuple(prompt)) for prompt in prompts)
            return [each.pop(0) if each else None for each in found]

        turn = Writing(
            samplings=(asking.sampling,), max_new_tokens=asking.max_prompt_tokens, seed=writing.seed, ends=users.ends
        )
        chats = active = [Row() for _ in range(asking.rows)]
        dropped: Counter[str] = Counter()
        # Two passes per turn: all user turns, then all answers. Only chats whose answer has ended get another turn.
        while active and len(passes) < 2 * asking.turns:
            turns = write("prompts", [users.prompt(chat) for chat in active], turn)
            reasons = [
                users.add(chat, tokens) if tokens else FAILED for chat, tokens in zip(active, turns, strict=True)
            ]
            asked = [chat for chat, reason in zip(active, reasons, strict=True) if not reason]
            dropped.update(reason for reason in reasons if reason)
            if not asked:
                break
            answers = write("answers", [chat.ids for chat in asked], writing)
            for chat, tokens in zip(asked, answers, strict=True):
                chat.add(tokens or [], 1)
                chat.end_with_answer()
            dropped.update(FAILED for tokens in answers if not tokens)
            answered = [chat for chat, tokens in zip(asked, answers, strict=True) if tokens]
            active = [chat for chat in answered if chat.ids[-1] in target.eos_token_ids and users.has_room(chat)]
        written = [chat for chat in chats if chat.ids]
        if not written:
            raise UserError(f"{target.name} wrote {asking.rows} prompts and none can be used: {_listed(dropped)}")
        facts: JsonObject = {
            "rows": len(written),
            "tokens": sum(sum(chat.mask) for chat in written),
            **counts,
            "dropped": dict(dropped.most_common()),
            "seconds": sum(each["seconds"] for each in passes),
            "passes": passes,
        }
        return work.conclude(lambda: ((chat.columns() for chat in written), facts))


def summary(folder: Path) -> str:
    """Return one line about the chats in a folder: rows, new tokens, seconds, and the dropped user turns by reason."""
    manifest = read_json(folder / "manifest.json")
    rows = f"{folder}: {manifest['rows']:,} rows, {manifest['tokens']:,} new tokens, {manifest['seconds']:,.0f} s"
    dropped = _listed(Counter(manifest["dropped"])) or "none"
    if cut := cut_answers(manifest):
        rows += f", {cut}"
    return f"{rows}; dropped of {manifest['begun']:,} prompts that the target wrote: {dropped}"


def _listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())
