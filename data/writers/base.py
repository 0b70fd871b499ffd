"""Answers of a target to prompts and whole chats, as rows: what holds whoever writes them, its engine or servers."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from data.batches import Batches, BatchFacts, Notes, stored_record
from data.conversations import Answering
from data.writing import Writing
from speculator.decoding.sampling import Sampling
from speculator.drafters import Drafter
from speculator.files import JsonObject
from speculator.prompts import Conversation
from speculator.target.text import source_of
from speculator.terminal import log


@dataclass(kw_only=True)
class Job:
    """Prompts that a writer answers, batch by batch.

    Attributes:
        chats: the prompts, with the token ids of the first turn.
        longest: largest number of tokens before an answer; a chat that becomes longer ends.
        work: the output folder, which knows the batches.
        failed: why answers failed, for log lines.
    """

    chats: Sequence[Conversation]
    writing: Writing
    tokenizer: PreTrainedTokenizerBase
    longest: int
    work: Batches
    failed: list[str] = field(default_factory=list)

    def begin(self, row: int) -> Answering:
        return Answering(self.chats[row], self.tokenizer, self.longest, row)

    def sampling(self, chat: Answering) -> Sampling:
        """Return the sampling of the next answer; answer a of the r-th of R prompts has the seed `seed + a R + r`."""
        return self.writing.sampling(chat.row, len(self.chats), chat.answers)

    def finish(self, batch: int, chats: Sequence[Answering], **facts: Any) -> None:
        """Store a batch whose chats, in the order of `work.rows[batch]`, have ended; `facts` are the writer's."""
        self.failed += [chat.fault for chat in chats if chat.fault]
        counts: BatchFacts = {"answers": sum(each.answers for each in chats), "cut": sum(each.cut for each in chats)}
        self.work.write(batch, [[row.columns() for row in each.rows] for each in chats], **counts, **facts)


class Writer(ABC):
    """Whoever writes the target's text. A subclass answers batches of prompts; all else is the same for each.

    Attributes:
        name: the target's, for messages and manifests.
        context_length: largest number of tokens of a prompt with its answer.
        drafter: proposes tokens to the target; None: plain decoding, or servers that have their own.
        record: further settings for manifests.
        batch_slots: rows of a batch, as a multiple of `batch_size`.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    batch_size: int
    drafter: Drafter | None = None
    record: JsonObject
    batch_slots: ClassVar[int] = 1

    def write(
        self,
        prompts: Sequence[Conversation],
        folder: str | Path,
        writing: Writing,
        *,
        max_prompt_tokens: int | None = None,
        title: str = "generating",
        may_be_empty: bool = False,
    ) -> Dataset:
        """Answer prompts, with the sampling, length and ends that `writing` names, and return the rows.

        The rows do not depend on interruptions, nor on the number of processes if each has as many threads. The same
        call resumes an unfinished folder, and returns the rows of a finished one. A chat ends before an answer that
        fails, as one whose logits are not finite or that lacks memory; without a first answer it gives no row.

        Args:
            prompts: prompts, and conversations of which every answer is written, each after the answers before it.
            folder: the output, shared by all processes.
            max_prompt_tokens: a conversation ends when it is longer (default: when no answer fits the context).
            may_be_empty: return no row, instead of an error, if no prompt can be answered.

        Returns:
            Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, in the
            order of the prompts, for a conversation one row or several (see `Answering`). With an encoder the prompt is
            in "source_ids", and "input_ids" begin with the decoder's start tokens.
            manifest.json in the folder holds the settings, "prompts" (their hash) and the facts of `Batches.finish`.

        Raises:
            UserError: no prompt can be answered, or the folder was made with other settings.
        """
        folder, chats = Path(folder), self.read(prompts)
        longest = min(max_prompt_tokens or self.context_length, self.context_length - writing.max_new_tokens)
        record = {"target": self.name, **self.record, **record_of(writing, chats)}
        if max_prompt_tokens:
            record["max_prompt_tokens"] = longest
        notes = self.notes(folder)
        # The longest first: rows of a batch have similar lengths, and too little memory shows in the first batch.
        order, size = (
            sorted(range(len(chats)), key=lambda row: -chats[row].size),
            self.batch_slots * notes["batch_size"],
        )
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        with Batches(folder, record, batches, title, notes, may_be_empty) as work:
            if todo := work.todo():
                job = Job(chats=chats, writing=writing, tokenizer=self.tokenizer, longest=longest, work=work)
                self.answer(job, todo)
                if job.failed:
                    count, first = sum(len(batches[batch]) for batch in todo), job.failed[0]
                    log(f"{len(job.failed)} of {count} prompts end before an answer that failed, such as: {first}")
            return work.finish()

    def read(self, prompts: Sequence[Conversation]) -> Sequence[Conversation]:
        """Return the prompts as the writer takes them; raise a UserError if it can't answer one."""
        return prompts

    def notes(self, folder: Path) -> Notes:
        """Return the notes of a folder; of a new one, what this run begins with."""
        size: Any = (stored_record(folder) or {}).get("batch_size", self.batch_size)
        return {"batch_size": size}

    @abstractmethod
    def answer(self, job: Job, todo: Sequence[int]) -> None:
        """Answer all prompts of some batches, and `finish` each batch."""

    def shortest_context(self) -> int:
        """Return the context length of whoever writes, which may be shorter than the target's."""
        return self.context_length


def settings_of(sampling: Sampling) -> JsonObject:
    """Return the fields of a sampling without its seed."""
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def record_of(writing: Writing, chats: Sequence[Conversation]) -> JsonObject:
    """Return the settings in the manifest that determine the rows, whoever writes them, with a hash of the prompts."""
    settings = [settings_of(each) for each in writing.samplings]
    prompts = [[[*source_of(chat.ids), *chat.ids], list(chat.later)] for chat in chats]
    return {
        "sampling": settings[0] if len(settings) == 1 else settings,
        "seed": writing.seed,
        "max_new_tokens": writing.max_new_tokens,
        "rows": len(chats),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        **({"ends": asdict(writing.ends)} if writing.ends else {}),
    }
