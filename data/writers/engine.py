"""The engine in this process as a writer: it answers prompts and chats, by speculative decoding if a head is given."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data.batches import POLL_SECONDS, BatchFacts, Notes, state, stored_record
from data.conversations import Answering
from data.writers.base import Job, Writer
from speculator.decoding.engine import Engine
from speculator.decoding.request import Request, check_prompts
from speculator.device import dtype_name
from speculator.drafters import Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostTable, entries_from_json
from speculator.drafters.measure import without_captures
from speculator.prompts import Conversation
from speculator.target.model import Target

BATCH_SIZE = 16
"""Rows decoded together. On a CPU more rows give more tokens per second, and drafting gains less."""
_TIMED_SHARE = 0.02
_TIMED_TOKENS = 64
"""Largest share of the rows (but at least one batch), and of their tokens, to time with and without drafting."""


class EngineWriter(Writer):
    """Answers with the target in this process.

    Args:
        drafter: proposes tokens; None: plain decoding. An adaptive one uses the step costs that a folder records, so
            that a resumed run drafts as it began.
    """

    batch_slots = 4  # within a batch a new row takes the slot of a finished one

    def __init__(self, target: Target, drafter: Drafter | None = None, batch_size: int = BATCH_SIZE):
        self.target, self.drafter, self.batch_size = target, drafter, batch_size
        self.name, self.tokenizer, self.context_length = target.name, target.tokenizer, target.context_length
        self.record = {
            "fingerprint": target.fingerprint,
            "dtype": dtype_name(target.dtype),
            "drafter": identity(drafter),
        }

    def read(self, prompts: Sequence[Conversation]) -> Sequence[Conversation]:
        """Raises a UserError for no prompt, an empty prompt, or one that fills the context."""
        texts = check_prompts(self.target, [chat.ids for chat in prompts])
        return [replace(chat, ids=text) for chat, text in zip(prompts, texts, strict=True)]

    def notes(self, folder: Path) -> Notes:
        notes, drafter = super().notes(folder), self.drafter
        if isinstance(drafter, AdaptiveDrafter):
            cost: Any = drafter.cost  # a `CostTable`
            while (stored := stored_record(folder)) is None and not state().is_main_process:
                time.sleep(POLL_SECONDS)  # for the costs of the main process
            costs: Any = (stored or {}).get("costs") or list(map(asdict, cost.entries))
            notes["costs"] = costs
            table = CostTable(entries_from_json(costs), learns=False)
            self.drafter = AdaptiveDrafter(drafter.head, drafter.choices, drafter.lookup, table, packed=drafter.packed)
        return notes

    def answer(self, job: Job, todo: Sequence[int]) -> None:
        if isinstance(self.drafter, AdaptiveDrafter):
            job.work.begin()  # other processes wait for the costs
        batches, slots = job.work.rows, min(self.batch_size, len(job.chats))
        # The room that each slot gets at once.
        room = min(max(len(chat.ids) for chat in job.chats) + job.writing.max_new_tokens, self.context_length)
        drafting, plain = (Engine(self.target, who, slots=slots, capacity=room) for who in (self.drafter, None))
        # A few batches are decoded twice, with and without drafts, for the speedup that the manifest reports.
        # Evenly spread: the batches go from long prompts to short ones.
        samples = min(len(batches), max(1, int(_TIMED_SHARE * len(job.chats)) // self.batch_size), 2)
        timed = {len(batches) * i // samples for i in range(samples)} if self.drafter else set()
        for batch in todo:
            facts: BatchFacts = {}
            if batch in timed:
                sample, count = batches[batch][:slots], min(job.writing.max_new_tokens, _TIMED_TOKENS)
                for engine in (drafting, plain):  # the first pass through a shape allocates
                    _clock(engine, job, sample, 4)
                facts["speculative"] = _clock(drafting, job, sample, count)
                facts["plain"] = _clock(plain, job, sample, count)
            drafting.forget()
            before, decoding = drafting.prefill_seconds + drafting.decode_seconds, drafting.decode_seconds
            chats = [job.begin(row) for row in batches[batch]]
            made = _answer(drafting, job, chats)
            if self.drafter is None:
                facts["plain"] = [sum(len(each.tokens) - 1 for each in made), drafting.decode_seconds - decoding]
            # Without steps that the end of an answer has cut: part of what they accepted lies after it.
            whole = [step for each in made for step in each.steps if not step.cut]
            facts["steps"] = [len(whole), sum(step.accepted + 1 for step in whole)]
            facts["seconds"] = drafting.prefill_seconds + drafting.decode_seconds - before
            job.finish(batch, chats, **facts)


def _clock(engine: Engine, job: Job, rows: list[int], count: int) -> list[float]:
    """Decode up to `count` tokens of the first answer of some rows; return [tokens, seconds], without prefill."""
    first = replace(job, writing=replace(job.writing, max_new_tokens=count))

    def decode() -> list[float]:
        engine.forget()
        before = engine.decode_seconds
        made = _answer(engine, first, [first.begin(row) for row in rows], several=False)
        # The prefill's token is not counted: its time is that of the prompt.
        return [sum(len(each.tokens) - 1 for each in made), engine.decode_seconds - before]

    return without_captures(decode)


def _answer(engine: Engine, job: Job, chats: list[Answering], several: bool = True) -> list[Request]:
    """Write the answers of some chats, or without `several` the first of each; return the requests that did not fail.

    They are in the order in which they finished. A chat's next request goes to the front of the queue, because the slot
    that its last one frees still holds the conversation's keys and values.
    """
    made: list[Request] = []
    options = {"max_new_tokens": job.writing.max_new_tokens, **(asdict(job.writing.ends) if job.writing.ends else {})}

    def ask(chat: Answering) -> tuple[Request, Answering]:
        assert chat.prompt is not None  # it has not ended
        return engine.submit(chat.prompt.ids, job.sampling(chat), **options), chat

    unfinished = [ask(chat) for chat in chats]
    try:
        while unfinished:
            engine.step()
            finished = [entry for entry in unfinished if entry[0].finish_reason]
            unfinished = [entry for entry in unfinished if not entry[0].finish_reason]
            for request, chat in finished:
                if request.failure:
                    chat.stop(request.failure)
                    continue
                made.append(request)
                chat.add(request.tokens, several and request.finish_reason == "eos")
                if chat.prompt is not None:
                    unfinished.append(ask(chat))
                    # To the front of the queue: the slot that has just become free holds this conversation.
                    engine.waiting.rotate(1)
    finally:  # an interrupt leaves no request behind
        for request, _ in unfinished:
            request.cancel()
    return made


def identity(drafter: Drafter | None) -> str | None:
    """Describe a drafter with its draft's shape and a digest of its weights, for the manifest; None without one."""
    if drafter is None:
        return None
    if not isinstance(drafter, HeadDrafter):
        return f"{drafter.name}, {drafter.nodes} tokens, {drafter.rules[0]} rule"
    name = "head, adaptive" if isinstance(drafter, AdaptiveDrafter) else f"head, {drafter.nodes} tokens"
    if isinstance(drafter.shape, FixedTree):
        name += f", tree {hashlib.sha256(repr(drafter.shape.paths).encode()).hexdigest()[:8]}"
    digest = hashlib.sha256()
    for weight in drafter.head.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"{name}, weights {digest.hexdigest()[:16]}"
