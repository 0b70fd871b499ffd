"""Sizes of a run that follow from its target and its rows."""

from __future__ import annotations

import os
from dataclasses import replace
from math import ceil
from pathlib import Path

import datasets
from pyarrow import compute
from transformers import PreTrainedConfig

from data.magpie import SELF
from data.sources import parse
from speculator.checkpoints import head_folder
from speculator.checkpoints.files import read_config
from speculator.terminal import log
from train.config import RunConfig, StageConfig

_LONGEST = 4096
"""Tokens of a row if the run names none; few chats are longer."""
_SHORTEST, _LEAST_ROWS = 256, 64
"""Little text has shorter rows, so that it has this many of them."""
_LEAST_STEPS = 50
"""Steps of an epoch, at least."""


def with_sizes_of_target(config: RunConfig, target: PreTrainedConfig | None) -> RunConfig:
    """Fill in the row length, that of a warm start's training if there is one, and leave out a draft vocabulary that the target's own does not exceed.

    Args:
        target: the target's config; None if it is unknown.
    """
    text = target.get_text_config() if target else None
    data, head = config.data, config.speculator
    if not data.seq_length:
        most = _LONGEST
        if head.warm_start:  # as long as it was trained on
            most = read_config(head_folder(head.warm_start, head.warm_start_revision)).get("trained_length") or most
        context = getattr(text, "max_position_embeddings", None) or most
        # A server generates a token after each text, see `ServerTarget`.
        data = replace(data, seq_length=min(most, context - bool(config.target.server)))
    if text is not None and head.draft_vocab_size >= text.vocab_size:
        head = replace(head, draft_vocab_size=0)
    return replace(config, data=data, speculator=head)


def with_shorter_rows(config: RunConfig, tokens: int) -> RunConfig:
    """Halve the row length until the training tokens make at least 64 rows, or rows are shorter than 512 tokens."""
    length = config.data.seq_length
    while length >= 2 * _SHORTEST and tokens < _LEAST_ROWS * length:
        length //= 2
    return replace(config, data=replace(config.data, seq_length=length))


def with_steps(stage: StageConfig, rows: int, processes: int) -> StageConfig:
    """Return a stage with its epochs turned into steps; one with max_steps stays as it is.

    Rows per step are halved while an epoch has fewer than 50 steps.

    Args:
        rows: number of training rows, over all processes.
    """
    if not stage.epochs:
        return stage
    size, accumulation = stage.per_device_train_batch_size, stage.gradient_accumulation_steps
    # Accumulation first, then the batch: 8 rows x 4 becomes 8 x 2, 8 x 1, 4 x 1, ...
    while size * accumulation > 1 and size * accumulation * processes * _LEAST_STEPS > rows:
        size, accumulation = (size, accumulation // 2) if accumulation > 1 else (size // 2, 1)
    steps = ceil(stage.epochs * rows / (size * accumulation * processes))
    return replace(stage, max_steps=steps, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)


def expected_rows(config: RunConfig) -> int | None:
    """Estimate the training rows of stage 1 before anything is read: 4 bytes per token; None for data on the hub."""
    tokens, own = 0.0, config.data.self_source
    for source in parse(config.data.sources):
        if source.location == SELF:
            tokens += own.max_rows * own.turns * (own.max_prompt_tokens + own.max_new_tokens)
        elif os.path.exists(source.location):
            place = Path(source.location)
            files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
            # 90% of a source train; a token has four bytes, as in English text.
            tokens += 0.9 * sum(file.stat().st_size for file in files) / 4
        else:
            return None
    tokens = min(tokens, config.data.max_tokens or tokens)
    return ceil(tokens / (config.data.seq_length or _LONGEST))


def count_of_tokens(packed: datasets.Dataset) -> int:
    """Count the tokens of rows."""
    return len(packed.with_format("arrow")["input_ids"].combine_chunks().flatten())


def longest(rows: datasets.Dataset) -> int:
    """Return the number of tokens of the longest row."""
    tables = rows.with_format("arrow").iter(batch_size=1000)
    return max(compute.max(compute.list_value_length(table["input_ids"])).as_py() for table in tables)


def log_sizes(asked: RunConfig, config: RunConfig, rows: datasets.Dataset) -> None:
    """Print the size of stage 1, and what was adapted to it."""
    stage, before = config.stage1, asked.stage1
    batch = stage.per_device_train_batch_size * stage.gradient_accumulation_steps
    was = before.per_device_train_batch_size * before.gradient_accumulation_steps
    notes = [f"rows of {config.data.seq_length} tokens"] * (config.data.seq_length != asked.data.seq_length)
    notes += [f"batches of {batch}, not {was}"] * (batch != was)
    little = f"; this is little text, so {' and '.join(notes)}" if notes else ""
    size = f"{count_of_tokens(rows):,} tokens in {len(rows):,} rows"
    log(f"stage 1 trains on {size}, for {stage.max_steps:,} steps{little}")
