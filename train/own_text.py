"""The text of stage 2, which the target generates."""

from __future__ import annotations

from pathlib import Path

import datasets

from data.conversations import Conversation
from data.onpolicy import generate_rows
from speculator import HeadDrafter
from speculator.checkpoints.loading import load_drafter, load_head
from speculator.target.model import Target
from speculator.target.server import ServerTarget
from speculator.target.training import TrainingTarget
from train import checks
from train.config import RunConfig
from train.self_source import fresh_rows


def generate_own_text(
    config: RunConfig, target: TrainingTarget, head_folder: Path, own_prompts: list[Conversation] | None
) -> datasets.Dataset:
    """Let the target continue prompts from the training text, with the head drafting.

    Without prompts the target writes the prompts as well.
    """
    settings, folder = config.stage2.generate, Path(config.output_dir) / "generated"
    if isinstance(target, ServerTarget):
        return _text_by_servers(config, target, own_prompts, folder)
    assert isinstance(target, Target)  # see `checks.check_writes_no_text`
    fixed, sampling = settings.num_speculative_tokens, checks.own_sampling(settings)
    drafter = (
        HeadDrafter(load_head(head_folder, target), fixed)
        if fixed
        else load_drafter(
            head_folder,
            target,
            temperatures=[each.temperature for each in sampling],
            batch_size=settings.batch_size,
        )
    )
    if own_prompts is None:
        return fresh_rows(config, target, drafter, folder)
    return generate_rows(
        target,
        drafter,
        own_prompts,
        folder,
        sampling=sampling,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=config.data.seq_length,
        batch_size=settings.batch_size,
        seed=config.seed,
        mark_rejected=config.stage2.rejected_token_weight is not None,
    )


def _text_by_servers(
    config: RunConfig, target: ServerTarget, own_prompts: list[Conversation] | None, folder: Path
) -> datasets.Dataset:
    from data.client import fetch_rows  # imports openai, for a second

    if own_prompts is None:
        return fresh_rows(config, target, None, folder)
    settings = config.stage2.generate
    return fetch_rows(
        target.urls,
        target.name,
        target.tokenizer,
        own_prompts,
        folder,
        sampling=checks.own_sampling(settings),
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=config.data.seq_length,
        seed=config.seed,
    )
