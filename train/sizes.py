"""Sizes of a run that follow from its target and its rows."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import ceil, inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import pyarrow
from pyarrow import compute, parquet
from transformers import PreTrainedConfig

from data.documents import Document
from data.mixture import PYTHON_SOURCES, SELF
from data.readers import source_files
from data.sources import documents
from data.tally import Tally
from speculator.checkpoints import head_folder
from speculator.checkpoints.files import read_config
from speculator.errors import UserError
from speculator.prompts import split_at_answers
from speculator.target.probe import usable_context
from speculator.target.remote.server_target import split
from speculator.terminal import log
from train.config import GenerateConfig, RunConfig, StageConfig

if TYPE_CHECKING:
    from train.settle import Run

_LONGEST = 4096
"""Tokens of a row if the run names none; few chats are longer."""
_SHORTEST, _LEAST_ROWS = 256, 64
"""Little text has shorter rows, so that it has this many of them."""
_PROMPTS_READ = 200
"""Documents of a source whose prompts are estimated."""
_LEAST_STEPS = 50
"""Steps of an epoch, at least."""


def with_sizes_of_target(config: RunConfig, text: PreTrainedConfig | None) -> RunConfig:
    """Return the config with a row length, if it has none: a warm start's, or 4,096, within the target's context.

    A draft vocabulary that the target's own does not exceed becomes 0, which stands for all tokens.

    Args:
        text: the target's text config; None if it is unknown.
    """
    data, head = config.data, config.speculator
    if not data.seq_length:
        most = _LONGEST
        if head.warm_start:  # as long as it was trained on
            most = read_config(head_folder(head.warm_start, head.warm_start_revision)).get("trained_length") or most
        context = usable_context(text) or most
        # A server generates a token after each text, see `ServerTarget`.
        data = replace(data, seq_length=min(most, context - bool(config.target.server)))
    if head.draft_vocab_size >= getattr(text, "vocab_size", inf):
        head = replace(head, draft_vocab_size=0)
    return replace(config, data=data, speculator=head)


def shortened(length: int, tokens: int, whole: int = 0) -> int:
    """Return a row length, halved until the training tokens make 64 rows, or until it is below 512 tokens.

    Args:
        tokens: number of training tokens.
        whole: length of rows that cut few chats; the result is at least as long, unless `length` is shorter.
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
    the width.

    Args:
        rows: number of training rows, over all processes.
        width: hidden size of the target.
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


def expected_rows(run: Run, length: int) -> int | None:
    """Estimate the training rows of stage 1 before anything is read: 4 bytes of text per token.

    For data on the hub it is `data.max_tokens` that counts; None without it.

    Args:
        length: number of tokens in a row.
    """
    config = run.config
    tokens, own, most = 0.0, config.data.self_source, config.data.max_tokens
    for source in run.mixture.sources:
        if source.location == SELF:
            tokens += own.max_rows * own.turns * (own.max_prompt_tokens + own.max_new_tokens)
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
    """Size of a prompt of stage 2.

    Attributes:
        tokens: number of its tokens, those of a chat's later user turns included.
        answers: number of answers that the target writes.
    """

    tokens: int
    answers: int = 1


def expected_prompts(run: Run) -> list[Prompt] | None:
    """Estimate the prompts of stage 2 by the first documents of each source, at 4 characters per token.

    None if a source is on the hub or can't be read.
    """
    own, generate, found = run.config.data.self_source, run.config.stage2.generate, list[Prompt]()
    for source in run.mixture.sources:
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
    """Count the tokens of rows."""
    tables = packed.with_format("arrow").iter(batch_size=1000)
    return sum(compute.sum(compute.list_value_length(table["input_ids"])).as_py() for table in tables)


def longest(rows: datasets.Dataset) -> int:
    """Return the number of tokens of the longest row."""
    tables = rows.with_format("arrow").iter(batch_size=1000)
    return max(compute.max(compute.list_value_length(table["input_ids"])).as_py() for table in tables)


def log_sizes(run: Run, name: str, rows: datasets.Dataset, length: int) -> None:
    """Print the number of rows and steps of a stage, and which of its settings were adapted to the rows.

    Args:
        name: "stage1" or "stage2".
        length: number of tokens in a row, which is printed if it is not `data.seq_length`.
    """
    before, stage = getattr(run.config, name), run.stage(name, len(rows))
    batch, was = (each.rows_per_step for each in (stage, before))
    notes = [f"rows of {length} tokens"] * (length != run.config.data.seq_length)
    notes += [f"batches of {batch}, not {was}"] * (batch != was)
    adapted = f"; this is little text, so {' and '.join(notes)}" if notes else ""
    if stage.learning_rate != before.learning_rate:
        base = before.base_batch_size or was * run.processes
        width = run.head.emb_dim
        adapted += (
            f"; the learning rate is {stage.learning_rate:.2g} for {batch * run.processes} rows a step and a target of "
            f"width {width}: {before.learning_rate:.2g} is for {base} rows and width {before.base_width or width}"
        )
    size = f"{count_of_tokens(rows):,} tokens in {len(rows):,} rows"
    log(f"{name.replace('stage', 'stage ')} trains on {size}, for {stage.max_steps:,} steps{adapted}")
