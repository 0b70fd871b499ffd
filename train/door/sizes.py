"""Sizes of a run that follow from its settings, its target and its rows."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import ceil, inf, sqrt
from pathlib import Path

import datasets
import pyarrow
from pyarrow import compute, parquet
from transformers import PreTrainedConfig

from data.documents import Document
from data.mixture import PYTHON_SOURCES, SELF, Mixture
from data.readers import source_files
from data.sources import documents
from data.tally import Tally
from speculator.errors import UserError
from speculator.heads import SpeculatorConfig
from speculator.prompts import split_at_answers
from speculator.target.probe import usable_context
from speculator.target.remote.server_target import split
from train.options.config import GenerateConfig, RunConfig, StageConfig

_LONGEST = 4096
"""Tokens of a row if the run names none; few chats are longer."""
_SHORTEST, _LEAST_ROWS = 256, 64
"""Little text has shorter rows, so that it has this many of them."""
_PROMPTS_READ = 200
"""Documents of a source whose prompts are estimated."""
_LEAST_STEPS = 50
"""Steps of an epoch, at least."""


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer, at the longest that the settings allow.

    Attributes:
        settings: names of the settings that say so.
        prompt, new: tokens of the prompt and of the answer.
    """

    settings: str
    prompt: int
    new: int

    def tokens(self, prompt: int | None = None, answers: int = 1) -> int:
        """Return the tokens of a text: those of a prompt (None: the longest) and of its answers."""
        return (self.prompt if prompt is None else prompt) + answers * self.new


@dataclass(frozen=True)
class Lengths:
    """The longest texts of a run, by its settings."""

    row: int  # tokens of a training row of stage 1
    evaluated: Exchange  # prompts of evaluations
    chat: Exchange | None  # a user turn of the source `self`, with its answer; None without that source
    turns: int  # user turns of such a chat
    own: Exchange | None  # a prompt of stage 2, with its answer; None without that stage

    @classmethod
    def of(cls, config: RunConfig, mixture: Mixture) -> Lengths:
        own, generate, measured = config.data.self_source, config.stage2.generate, config.eval
        self_prompt = ("data.self_source.max_prompt_tokens", own.max_prompt_tokens)
        name, tokens = self_prompt if mixture.is_self else ("stage2.generate.prompt_tokens", generate.prompt_tokens)
        sides = f"{self_prompt[0]} + data.self_source.max_new_tokens"
        return cls(
            row=config.data.seq_length,
            evaluated=Exchange(
                "eval.prompt_tokens + eval.max_new_tokens", measured.prompt_tokens, measured.max_new_tokens
            ),
            chat=Exchange(sides, own.max_prompt_tokens, own.max_new_tokens) if mixture.names_self else None,
            turns=own.turns,
            own=Exchange(f"{name} + stage2.generate.max_new_tokens", tokens, generate.max_new_tokens)
            if config.stage2.max_steps
            else None,
        )

    def check(self, context: int, room: str) -> None:
        """Raise a UserError if a length exceeds `context` tokens; `room` says so, and ends the message."""
        asked = {"data.seq_length": self.row}
        asked |= {each.settings: each.tokens() for each in (self.evaluated, self.chat, self.own) if each}
        for name, length in asked.items():
            if length > context:
                raise UserError(f"{name} is {length}, but {room}")

    @property
    def chat_tokens(self) -> int:
        """Tokens of the longest chat of the source `self`; 0 without it."""
        return self.turns * self.chat.tokens() if self.chat else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest document that is trained on."""
        most = max(self.row, self.chat_tokens)
        return self.own.tokens(most) if self.own else most


def with_sizes_of_target(
    config: RunConfig, text: PreTrainedConfig | None, start: SpeculatorConfig | None = None
) -> RunConfig:
    """Return the config with a row length, if it has none: a warm start's, or 4,096, within the target's context.

    A draft vocabulary that the target's own does not exceed becomes 0, which stands for all tokens. `text` is the
    target's text config, None if it is unknown; `start` is the config of a warm start's head.
    """
    data, head = config.data, config.speculator
    if not data.seq_length:
        most = (start and start.trained_length) or _LONGEST  # as long as it was trained on
        context = usable_context(text) or most
        # A server generates a token after each text, see `ServerTarget`.
        data = replace(data, seq_length=min(most, context - bool(config.target.server)))
    if head.draft_vocab_size >= getattr(text, "vocab_size", start.vocab_size if start else inf):
        head = replace(head, draft_vocab_size=0)
    return replace(config, data=data, speculator=head)


def shortened(length: int, tokens: int, whole: int = 0) -> int:
    """Return a row length, halved until the training tokens make 64 rows, or until it is below 512 tokens.

    It is not halved below `whole`, the length of rows that cut few chats.
    """
    while length >= max(2 * _SHORTEST, 2 * whole) and tokens < _LEAST_ROWS * length:
        length //= 2
    return length


def shortened_for(length: int, packed: datasets.Dataset) -> int:
    """Return the row length `shortened` for rows of the length `length`, so that it cuts few of their chats."""
    tokens = count_of_tokens(packed)
    if shortened(length, tokens) == length:  # then the chats, which take a pass over all tokens, do not matter
        return length
    return shortened(length, tokens, length_of_chats(packed))


def length_of_chats(packed: datasets.Dataset) -> int:
    """Return the smallest row length that leaves at least 90% of the tokens in documents that it does not cut.

    Only documents with a prompt (tokens without loss), such as chats, count; 0 if there are none.
    """
    documents = (split(row["loss_mask"], row["document_ids"]) for row in packed)
    sizes = sorted(len(mask) for row in documents for mask in row if not all(mask))
    total = sum(sizes)
    within = accumulate(sizes)  # tokens of the chats up to each size
    return next((size for size, tokens in zip(sizes, within, strict=True) if 10 * tokens >= 9 * total), 0)


def with_steps(stage: StageConfig, rows: int, processes: int, width: int) -> StageConfig:
    """Return a stage with its epochs turned into steps, and its learning rate for the rows of its steps and the target.

    Rows per step are halved while an epoch has fewer than 50 steps. The rate follows their square root, and one over
    `width`, the target's hidden size. `rows` counts the training rows of all processes.
    """
    size, accumulation = stage.per_device_train_batch_size, stage.gradient_accumulation_steps
    base = stage.base_batch_size or size * accumulation * processes
    # Accumulation first, then the batch: 8 rows x 4 becomes 8 x 2, 8 x 1, 4 x 1, ...
    while stage.epochs and size * accumulation > 1 and size * accumulation * processes * _LEAST_STEPS > rows:
        size, accumulation = (size, accumulation // 2) if accumulation > 1 else (size // 2, 1)
    batch = size * accumulation * processes
    return replace(
        stage,
        max_steps=ceil(stage.epochs * rows / batch) if stage.epochs else stage.max_steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulation,
        learning_rate=stage.learning_rate * sqrt(batch / base) * ((stage.base_width or width) / width),
    )


def expected_rows(config: RunConfig, mixture: Mixture, chat_tokens: int, length: int) -> int | None:
    """Estimate the training rows of stage 1, of `length` tokens, before anything is read: 4 bytes of text per token.

    For data on the hub `data.max_tokens` counts; None without it. A chat of the source `self` has `chat_tokens`.
    """
    tokens, most = 0.0, config.data.max_tokens
    for source in mixture.sources:
        if source.location == SELF:
            tokens += config.data.self_source.max_rows * chat_tokens
        elif os.path.exists(source.location):
            # 90% of a source train; a token has four bytes, as in English text.
            tokens += 0.9 * sum(map(_bytes_of_text, source_files(Path(source.location)))) / 4
        elif most is None:
            return None
        else:
            tokens = most
    return ceil(min(tokens, most or tokens) / length)


def _bytes_of_text(place: Path) -> int:
    """Return the size of a file's text as it is when it is unpacked."""
    with suppress(OSError, ValueError, pyarrow.ArrowException, struct.error):  # a run reports what it can't read
        if place.suffix == ".gz":
            with place.open("rb") as file:
                file.seek(-4, os.SEEK_END)
                return struct.unpack("<I", file.read(4))[0]  # gzip's own note of the size, modulo 4 GB
        if place.suffix == ".parquet":
            groups = parquet.read_metadata(place)
            return sum(groups.row_group(i).total_byte_size for i in range(groups.num_row_groups))
    return place.stat().st_size


@dataclass(frozen=True)
class Prompt:
    """Size of a prompt of stage 2."""

    tokens: int  # number of its tokens, those of a chat's later user turns included
    answers: int = 1  # number of answers that the target writes


def expected_prompts(config: RunConfig, mixture: Mixture) -> list[Prompt] | None:
    """Estimate the prompts of stage 2 by the first documents of each source, at 4 characters per token.

    None if a source is on the hub or can't be read.
    """
    own, generate, found = config.data.self_source, config.stage2.generate, list[Prompt]()
    for source in mixture.sources:
        if source.location == SELF:
            found.append(Prompt(own.turns * own.max_prompt_tokens, own.turns))
            continue
        if source.location != PYTHON_SOURCES and not os.path.exists(source.location):
            return None
        try:
            read = documents(source.location, None, tally=Tally(max_share=1.0))
            found += [_prompt_of(row, generate) for row in islice(read, _PROMPTS_READ)]
        except UserError:  # the run says what is wrong with it
            return None
    return found or None


def _prompt_of(row: Document, generate: GenerateConfig) -> Prompt:
    """Return the estimated size of the prompt that a document gives."""
    if "messages" in row:
        opening, later = split_at_answers(row["messages"], None if generate.turns == "all" else generate.turns)
        asked = sum(len(message.get("content") or "") for turn in (opening, *later) for message in turn)
        return Prompt(asked // 4, 1 + len(later))
    if "prompt" in row:
        return Prompt(len(row["prompt"]) // 4)
    mask = row.get("loss_mask", [1])
    return Prompt(generate.prompt_tokens if mask[0] or 1 not in mask else mask.index(1))


def count_of_tokens(packed: datasets.Dataset) -> int:
    tables = packed.with_format("arrow").iter(batch_size=1000)
    return sum(compute.sum(compute.list_value_length(table["input_ids"])).as_py() for table in tables)


def longest(rows: datasets.Dataset) -> int:
    """Return the number of tokens of the longest row."""
    tables = rows.with_format("arrow").iter(batch_size=1000)
    return max(compute.max(compute.list_value_length(table["input_ids"])).as_py() for table in tables)
