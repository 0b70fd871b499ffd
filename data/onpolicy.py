"""On-policy text: the target continues prompts through the project's own decoder, a head drafting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn, uint8
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from data.batches import Batches
from speculator.decoding.generate import Generation, check_prompts, generate
from speculator.decoding.sampling import Sampling
from speculator.decoding.session import Session
from speculator.drafters import Drafter, HeadDrafter
from speculator.errors import refuse
from speculator.target import Target, dtype_name

BATCH_SIZE = 16
"""Rows at a time. On a CPU more rows give more tokens a second, and a draft adds less to them: the more rows, the
shorter should be the drafts (docs/benchmarks/training.md)."""
_TIMED_EVERY = 16
"""Every so manieth batch is decoded once more without a draft."""
ON_POLICY = Sampling(temperature=1.0)


def generate_rows(
    target: Target,
    drafter: Drafter | None,
    prompts: list[list[int]],
    folder: str | Path,
    *,
    sampling: Sampling | Sequence[Sampling] = ON_POLICY,
    max_new_tokens: int = 256,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: bool = True,
) -> Dataset:
    """Continue prompts by the target, in the law that `sampling` names, whoever drafts.

    Row r draws from the stream `seed + r` and batches are always the same, so the rows do not depend on interruptions,
    nor on the number of processes where each has as many threads. The same call goes on in an unfinished folder, and
    gives the rows of a finished one.

    Args:
        target: the model that decides; whole in every process.
        drafter: who proposes; None decodes plainly.
        prompts: token ids. Batches are of similar lengths, the longest first: what does not fit in memory fails soon.
        folder: where the rows and manifest.json come to lie; several processes share it.
        sampling: temperature and its kin; its seed is not used. Of several the rows take each in turn.
        max_new_tokens: the most new tokens a row; a row also ends with EOS, which it keeps, or at the context's end.
        batch_size: rows at a time.
        seed: of the sampling.
        progress: show a bar.

    Returns:
        Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, in the order
        of the prompts. Beside them manifest.json: {"target", "drafter", "sampling", "seed", "max_new_tokens",
        "batch_size", "prompts": their hash, "rows", "tokens": new ones, "tokens_per_step", "tokens_per_second":
        {"speculative", "same_loop"}}, the last two clocked on the same few batches, one after the other, without the
        prefill.

    Raises:
        UserError: no prompt, an empty one or one that fills the context; a folder that was made otherwise; a target
            that is sharded over processes.
    """
    refuse(
        (batch_size < 1, f"a batch size of {batch_size} is not at least 1"),
        (max_new_tokens < 1, f"max_new_tokens {max_new_tokens} is not at least 1"),
        (_is_sharded(target.model), f"{target.name}: generating with a target sharded over processes is not supported"),
    )
    check_prompts(target, prompts)
    laws = [sampling] if isinstance(sampling, Sampling) else list(sampling)
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    record = {
        "target": target.name,
        "dtype": dtype_name(target.dtype),
        "drafter": _identity(drafter) if drafter else None,
        **record_of(laws, seed, max_new_tokens, prompts),
        "batch_size": batch_size,
    }

    sessions: dict[int, Session] = {}

    def decode(who: Drafter | None, batch: int, count: int = max_new_tokens) -> Generation:
        own = [replace(laws[row % len(laws)], seed=seed + row) for row in batches[batch]]
        texts = [prompts[row] for row in batches[batch]]
        session = sessions.setdefault(len(texts), Session(target))
        session.forget()
        return generate(target, who, texts, own, max_new_tokens=count, session=session)

    with Batches(Path(folder), record, batches, progress) as work:
        for batch in work.todo():
            timed = drafter is not None and batch % _TIMED_EVERY == 0
            if timed:  # the first pass through a shape allocates
                decode(drafter, batch, 4), decode(None, batch, 4)
            # Which of the two comes first changes from one timed batch to the next.
            early = decode(None, batch) if timed and batch // _TIMED_EVERY % 2 else None
            made = decode(drafter, batch)
            plain = (early or decode(None, batch)) if timed else None
            whole = [step for row in made.steps for step in row if not step.cut]
            work.write(
                batch,
                made.tokens,
                steps=[len(whole), sum(step.accepted + 1 for step in whole)],
                speculative=_clock(made) if timed else None,
                same_loop=_clock(plain or made) if timed or not drafter else None,
            )
        return work.finish(prompts, _summary)


def record_of(laws: Sequence[Sampling], seed: int, max_new_tokens: int, prompts: list[list[int]]) -> dict[str, Any]:
    """What continuations depend on, whoever makes them."""
    settings = [asdict(law) for law in laws]
    for law in settings:
        del law["seed"]
    return {
        "sampling": settings[0] if len(settings) == 1 else settings,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "rows": len(prompts),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def _clock(made: Generation) -> list[float]:
    """Tokens that decoding gave, the prefill's left out, and its seconds."""
    return [sum(len(row) - 1 for row in made.tokens), made.decode_seconds]


def _summary(batches: list[dict]) -> dict[str, Any]:
    def rate(name: str) -> float | None:
        clocks = [batch[name] for batch in batches if batch[name]]
        tokens, seconds = (sum(column) for column in zip(*clocks, strict=True)) if clocks else (0, 0)
        return tokens / seconds if seconds else None

    steps, emitted = (sum(column) for column in zip(*(batch["steps"] for batch in batches), strict=True))
    return {
        "tokens_per_step": emitted / steps if steps else None,
        "tokens_per_second": {"speculative": rate("speculative"), "same_loop": rate("same_loop")},
    }


def _identity(drafter: Drafter) -> str:
    """Names a drafter. What it drafts decides which uniform decides what, so a head's weights are part of its name."""
    name = f"{drafter.name}, {drafter.nodes} tokens, {drafter.rules[0]} rule"
    if not isinstance(drafter, HeadDrafter):
        return name
    digest = hashlib.sha256()
    for weight in drafter.head.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(uint8).numpy().tobytes())
    return f"{name}, weights {digest.hexdigest()[:16]}"


def _is_sharded(model: nn.Module) -> bool:
    """Every process decodes batches of its own, at a pace of its own, so no forward pass may need the others."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )
