"""Generate rows with the target: it answers prompts and whole chats, by speculative decoding if a head is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset

from data.batches import Batches, BatchFacts, Clocks, wait_for_record
from data.conversations import Answering
from data.writing import Writing
from speculator.decoding.engine import Engine
from speculator.decoding.request import Request, check_prompts
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostTable, entries_from_json
from speculator.drafters.measure import without_captures
from speculator.files import JsonObject
from speculator.heads import Speculator
from speculator.prompts import Conversation
from speculator.target.encoder.encoder import source_of
from speculator.target.model import Target
from speculator.terminal import log

BATCH_SIZE = 16
"""Rows decoded together. On a CPU more rows give more tokens per second, and drafting gains less."""
_PIECE = 4
"""Rows per piece, as a multiple of the batch size. Within a piece a new row takes the slot of a finished one."""
_TIMED_SHARE = 0.02
_TIMED_TOKENS = 64
"""Largest share of the rows (but at least one batch), and of their tokens, to time with and without drafting."""


def generate_rows(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int] | Conversation],
    folder: str | Path,
    writing: Writing,
    *,
    batch_size: int = BATCH_SIZE,
    max_prompt_tokens: int | None = None,
    progress: bool = True,
    title: str = "generating",
) -> Dataset:
    """Continue prompts with the target, in the distribution that `writing` names, with any drafter.

    Answer a of the r-th of R prompts uses the seed `seed + a R + r`. The engine decodes the prompts in pieces, each in
    a fixed order and independent of the others. So the rows do not depend on interruptions, nor on the number of
    processes if each has as many threads. The same call resumes an unfinished folder, and returns the rows of a
    finished one.

    Args:
        target: the model.
        drafter: proposes tokens; None: plain decoding. An adaptive one uses the step costs that the folder records, so
            that a resumed run gives the same rows.
        prompts: token ids, or conversations, of which every answer is made, each after the answers before it. The
            longest are decoded first, so that a lack of memory shows early.
        folder: the output, shared by all processes.
        writing: sampling, length and end of the continuations.
        batch_size: rows decoded together.
        max_prompt_tokens: a conversation ends when it is longer (default: when no answer fits the context).
        progress: show a progress bar with this title.

    Returns:
        Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, in the order
        of the prompts, for a conversation one row or several (see `Answering`). With an encoder the prompt is in
        "source_ids", and "input_ids" begin with the decoder's start tokens.
        manifest.json in the folder holds the settings, "prompts" (their hash), "rows", "tokens" (new ones), "answers",
        "cut" (answers of chats that reached `max_new_tokens`), "skipped" (prompts whose first answer failed),
        "acceptance_length", "tokens_per_second" ("speculative" and "plain", without prefill, timed one after the other
        on the same few rows) and "seconds" (all rows and processes, with prefill). An adaptive drafter adds "costs",
        see `decoding.json`.

    Raises:
        UserError: no prompt, an empty prompt, or one that fills the context; or a folder made with other settings.
    """
    chats = [each if isinstance(each, Conversation) else Conversation(each) for each in prompts]
    texts = check_prompts(target, [chat.ids for chat in chats])
    chats = [replace(chat, ids=text) for chat, text in zip(chats, texts, strict=True)]
    # The longest first: rows of a batch have similar lengths, and too little memory shows in the first batch.
    order = sorted(range(len(prompts)), key=lambda row: -chats[row].size)
    piece_size = _PIECE * batch_size
    pieces = [order[start : start + piece_size] for start in range(0, len(order), piece_size)]
    slots = min(batch_size, len(prompts))
    # `longest` is the room that each slot gets at once; `most` the longest chat that still gets an answer.
    longest = min(max(len(chat.ids) for chat in chats) + writing.max_new_tokens, target.context_length)
    most = min(max_prompt_tokens or target.context_length, target.context_length - writing.max_new_tokens)
    notes: JsonObject = {}
    if isinstance(drafter, AdaptiveDrafter):
        # A resumed run drafts by the costs that the first one measured, so its rows are those of an uninterrupted one.
        stored = wait_for_record(Path(folder)) or {}
        cost: Any = drafter.cost  # a `CostTable`
        costs: Any = stored.get("costs") or list(map(asdict, cost.entries))
        notes["costs"] = costs
        table = CostTable(entries_from_json(costs), learns=False)
        drafter = AdaptiveDrafter(drafter.head, drafter.choices, drafter.lookup, table, packed=drafter.packed)
    # A few batches are decoded twice, with and without drafts, for the speedup that the manifest reports.
    # Evenly spread: the pieces go from long prompts to short ones.
    samples = min(len(pieces), max(1, int(_TIMED_SHARE * len(prompts)) // batch_size), 2)
    timed = {len(pieces) * i // samples for i in range(samples)} if drafter else set()
    record: JsonObject = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target.dtype),
        "drafter": identity(drafter),
        **record_of(writing, chats),
        "batch_size": batch_size,
        **({"max_prompt_tokens": most} if max_prompt_tokens else {}),
        **({"ends": asdict(writing.ends)} if writing.ends else {}),
    }
    drafting, plain = (Engine(target, who, slots=slots, capacity=longest) for who in (drafter, None))

    def clock(engine: Engine, rows: list[int], count: int) -> list[float]:
        """Decode up to `count` tokens of the first answer of some rows; return [tokens, seconds], without prefill."""

        def decode() -> list[float]:
            engine.forget()
            before = engine.decode_seconds
            first = [Answering(replace(chats[row], later=()), None, most) for row in rows]
            made, _ = _answer(engine, first, rows, len(prompts), replace(writing, max_new_tokens=count))
            # The prefill's token is not counted: its time is that of the prompt.
            return [sum(len(each.tokens) - 1 for each in made), engine.decode_seconds - before]

        return without_captures(decode)

    with Batches(Path(folder), record, pieces, progress, title, notes) as work:
        if notes and not work.finished:
            work.begin()  # other processes wait for the costs
        for piece in work.todo():
            clocks: Clocks = {"speculative": None, "plain": None}
            if piece in timed:
                sample, count = pieces[piece][:slots], min(writing.max_new_tokens, _TIMED_TOKENS)
                for engine in (drafting, plain):  # the first pass through a shape allocates
                    clock(engine, sample, 4)
                clocks["speculative"] = clock(drafting, sample, count)
                clocks["plain"] = clock(plain, sample, count)
            drafting.forget()
            before, decoding = drafting.prefill_seconds + drafting.decode_seconds, drafting.decode_seconds
            answering = [Answering(chats[row], target.tokenizer, most) for row in pieces[piece]]
            made, failed = _answer(drafting, answering, pieces[piece], len(prompts), writing)
            if drafter is None:
                clocks["plain"] = [sum(len(each.tokens) - 1 for each in made), drafting.decode_seconds - decoding]
            # Without steps that the end of an answer has cut: part of what they accepted lies after it.
            whole = [step for each in made for step in each.steps if not step.cut]
            steps = [len(whole), sum(step.accepted + 1 for step in whole)]
            seconds = drafting.prefill_seconds + drafting.decode_seconds - before
            rows = [[row.columns() for row in each.rows] for each in answering]
            cut = sum(each.cut for each in answering)
            if failed:
                log(f"{len(failed)} of {len(rows)} prompts end before an answer that failed, such as: {failed[0]}")
            work.write(piece, rows, steps=steps, seconds=seconds, answers=len(made), cut=cut, **clocks)
        return work.finish(_summary)


def _answer(
    engine: Engine, answering: list[Answering], rows: list[int], count: int, writing: Writing
) -> tuple[list[Request], list[str]]:
    """Let the target write all answers of some conversations.

    Returns a request per answer, in the order they finished, and the messages of requests that failed. A conversation
    ends before an answer that failed.

    A conversation ends before an answer that fails, as one whose logits are not finite.

    When an answer is finished, the request for the next one goes to the front of the queue, because the slot that it
    frees still holds the conversation's keys and values.

    Args:
        answering: the conversations; the answers are added to them.
        rows: index of each conversation among all prompts, which determines its sampling.
        count: number of all prompts.
        writing: sampling, length and end of the answers.
    """
    made: list[Request] = []
    failed: list[str] = []
    options = {"max_new_tokens": writing.max_new_tokens, **(asdict(writing.ends) if writing.ends else {})}

    def ask(row: int, each: Answering) -> tuple[Request, int, Answering]:
        assert each.prompt is not None  # it has not ended
        return engine.submit(each.prompt.ids, writing.sampling(row, count, each.answers), **options), row, each

    unfinished = [ask(row, each) for row, each in zip(rows, answering, strict=True)]
    try:
        while unfinished:
            engine.step()
            finished = [entry for entry in unfinished if entry[0].finish_reason]
            unfinished = [entry for entry in unfinished if not entry[0].finish_reason]
            for request, row, each in finished:
                if request.failure:
                    failed.append(request.failure)
                    each.stop()
                    continue
                made.append(request)
                each.add(request.tokens, request.finish_reason == "eos")
                if each.prompt is not None:
                    unfinished.append(ask(row, each))
                    # To the front of the queue: the slot that has just become free holds this conversation.
                    engine.waiting.rotate(1)
    finally:  # an interrupt leaves no request behind
        for request, *_ in unfinished:
            request.cancel()
    return made, failed


def identity(drafter: Drafter | None) -> str | None:
    """Describe a drafter with its draft's shape and a digest of its weights, for the manifest; None without one."""
    if drafter is None:
        return None
    if not isinstance(drafter, HeadDrafter):
        return f"{drafter.name}, {drafter.nodes} tokens, {drafter.rules[0]} rule"
    name = "head, adaptive" if isinstance(drafter, AdaptiveDrafter) else f"head, {drafter.nodes} tokens"
    if isinstance(drafter.shape, FixedTree):
        name += f", tree {hashlib.sha256(repr(drafter.shape.paths).encode()).hexdigest()[:8]}"
    return f"{name}, weights {_weights_digest(drafter.head)}"


def _weights_digest(head: Speculator) -> str:
    """Return 16 hexadecimal digits of a hash over a head's weights."""
    digest = hashlib.sha256()
    for weight in head.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def settings_of(sampling: Sampling) -> JsonObject:
    """Return the fields of a sampling without its seed."""
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def record_of(writing: Writing, chats: Sequence[Conversation]) -> JsonObject:
    """Return the settings in the manifest that determine the rows, whichever drafter or server makes them.

    They include a hash of the prompts.
    """
    settings = [settings_of(each) for each in writing.samplings]
    prompts = [[[*source_of(chat.ids), *chat.ids], list(chat.later)] for chat in chats]
    return {
        "sampling": settings[0] if len(settings) == 1 else settings,
        "seed": writing.seed,
        "max_new_tokens": writing.max_new_tokens,
        "rows": len(chats),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def _summary(batches: list[BatchFacts]) -> JsonObject:
    """Return facts for the manifest over all batches: acceptance length, tokens per second, seconds and answers."""

    def rate(name: Literal["speculative", "plain"]) -> float | None:
        clocks = [batch[name] for batch in batches if batch[name]]
        tokens, seconds = (sum(column) for column in zip(*clocks, strict=True)) if clocks else (0, 0)
        return tokens / seconds if seconds else None

    steps, emitted = (sum(column) for column in zip(*(batch["steps"] for batch in batches), strict=True))
    return {
        "acceptance_length": emitted / steps if steps else None,
        "tokens_per_second": {"speculative": rate("speculative"), "plain": rate("plain")},
        "seconds": sum(batch["seconds"] for batch in batches),
        "answers": sum(batch["answers"] for batch in batches),
    }
