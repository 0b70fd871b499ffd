"""Generate rows with the target: it continues prompts, by speculative decoding if a draft head is given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from data.batches import Batches, awaited
from speculator.decoding.engine import Engine
from speculator.decoding.request import Generation, check_prompts, rejection_marks
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostTable, entry_from_json, entry_to_json
from speculator.errors import UserError
from speculator.heads import Speculator
from speculator.target.model import Target

BATCH_SIZE = 16
"""Rows decoded together. On a CPU more rows give more tokens per second, and drafting gains less."""
_PIECE = 4
"""Rows per piece, as a multiple of the batch size. Within a piece a new row takes the slot of a finished one."""
_TIMED_SHARE = 0.02
_TIMED_TOKENS = 64
"""Largest share of the rows (but at least one batch), and of their tokens, to time with and without drafting."""
ON_POLICY = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Ends:
    """Stop tokens and stop strings."""

    eos_token_ids: list[int]
    stop_strings: list[str] = field(default_factory=list)


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
    ends: Ends | None = None,
    progress: bool = True,
    mark_rejected: bool = False,
    title: str = "generating",
) -> Dataset:
    """Continue prompts with the target, in the distribution of `sampling`, with any drafter.

    Row r uses the seed `seed + r`. The engine decodes the rows in pieces, each in a fixed order and independent of the
    others. So the rows do not depend on interruptions, nor on the number of processes if each has as many threads. The
    same call resumes an unfinished folder, and returns the rows of a finished one.

    Args:
        target: the model. Processes that share one sharded target generate the same pieces.
        drafter: proposes tokens; None: plain decoding. An adaptive one uses the step costs that the folder records, so
            that a resumed run gives the same rows. With `mark_rejected` it always drafts, in its fastest shape.
        prompts: token ids. The longest are decoded first, so that a lack of memory shows early.
        folder: the output, shared by all processes.
        sampling: temperature and filters; the seed is ignored. The rows cycle through several samplings.
        max_new_tokens: largest number of new tokens. A row also ends with EOS, which it keeps, or with the context.
        batch_size: rows decoded together.
        seed: seed of the first row.
        ends: stop tokens and strings (default: the target's EOS).
        progress: show a progress bar with this title.
        mark_rejected: mark the tokens that replaced a rejected draft token.

    Returns:
        Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, in the order
        of the prompts; with `mark_rejected` also "rejected", 1 on each token that replaced a rejected draft token.
        manifest.json in the folder holds the settings, "prompts" (their hash), "rows", "tokens" (new ones),
        "acceptance_length", "tokens_per_second" ("speculative" and "plain", without prefill, timed one after the other
        on the same few rows) and "seconds" (all rows and processes, with prefill). An adaptive drafter adds "costs",
        see `decoding.json`.

    Raises:
        UserError: no prompt, an empty prompt, or one that fills the context; a folder made with other settings; or a
            target that was not sharded by `Target.load`.
    """
    if target.group is None and _is_sharded(target.model):
        raise UserError(f"{target.name} is sharded: load it with Target.load, which knows the processes that share it")
    check_prompts(target, prompts)
    samplings = [sampling] if isinstance(sampling, Sampling) else list(sampling)
    order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
    piece_size = _PIECE * batch_size
    pieces = [order[start : start + piece_size] for start in range(0, len(order), piece_size)]
    slots = min(batch_size, len(prompts))
    longest = min(max(map(len, prompts)) + max_new_tokens, target.context_length)
    stopping = asdict(ends) if ends else {}
    settings = [replace(samplings[row % len(samplings)], seed=seed + row) for row in range(len(prompts))]
    requests = list(zip(prompts, settings, strict=True))
    notes = None
    if isinstance(drafter, AdaptiveDrafter):
        stored = awaited(Path(folder), target.group) or {}
        notes = {"costs": stored.get("costs") or [entry_to_json(entry) for entry in drafter.cost.entries]}
        table = CostTable([entry_from_json(entry) for entry in notes["costs"]])
        drafter = AdaptiveDrafter(drafter.head, drafter.choices, drafter.lookup, table)
        if mark_rejected:
            shape = drafter.fastest(all(setting.greedy for setting in settings), slots)
            drafter = HeadDrafter(drafter.head, shape)
    samples = min(len(pieces), max(1, int(_TIMED_SHARE * len(prompts)) // batch_size), 2)
    timed = {len(pieces) * i // samples for i in range(samples)} if drafter else set()
    record = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target.dtype),
        "drafter": identity(drafter),
        **record_of(samplings, seed, max_new_tokens, prompts),
        "batch_size": batch_size,
        **({"mark_rejected": True} if mark_rejected else {}),
        **({"ends": asdict(ends)} if ends else {}),
    }
    drafting, plain = (Engine(target, who, slots=slots, capacity=longest) for who in (drafter, None))

    def decode(engine: Engine, rows: list[int], count: int) -> Generation:
        engine.forget()
        inputs, how = zip(*(requests[row] for row in rows), strict=True)
        return engine.generate(inputs, how, max_new_tokens=count, **stopping)

    with Batches(Path(folder), record, pieces, progress, title, target.group, notes) as work:
        if notes and not work.finished:
            work.begin()  # other processes wait for the costs
        for piece in work.todo():
            clocks: dict[str, list[float] | None] = {"speculative": None, "plain": None}
            if piece in timed:
                sample, count = pieces[piece][:slots], min(max_new_tokens, _TIMED_TOKENS)
                for engine in (drafting, plain):  # the first pass through a shape allocates
                    decode(engine, sample, 4)
                clocks["speculative"] = _clock(decode(drafting, sample, count))
                clocks["plain"] = _clock(decode(plain, sample, count))
            made = decode(drafting, pieces[piece], max_new_tokens)
            if drafter is None:
                clocks["plain"] = _clock(made)
            whole = [step for row in made.steps for step in row if not step.cut]
            steps = [len(whole), sum(step.accepted + 1 for step in whole)]
            rejected = {"rejected": [rejection_marks(row) for row in made.steps]} if mark_rejected else {}
            seconds = made.prefill_seconds + made.decode_seconds
            work.write(piece, made.tokens, steps=steps, seconds=seconds, **clocks, **rejected)
        return work.finish(prompts, _summary)


def identity(drafter: Drafter | None) -> str | None:
    """Name a drafter and its weights."""
    if drafter is None:
        return None
    if not isinstance(drafter, HeadDrafter):
        return f"{drafter.name}, {drafter.nodes} tokens, {drafter.rules[0]} rule"
    name = "head, adaptive" if isinstance(drafter, AdaptiveDrafter) else f"head, {drafter.nodes} tokens"
    if isinstance(drafter.shape, FixedTree):
        name += f", tree {hashlib.sha256(repr(drafter.shape.paths).encode()).hexdigest()[:8]}"
    return f"{name}, weights {_weights_digest(drafter.head)}"


def _weights_digest(head: Speculator) -> str:
    digest = hashlib.sha256()
    for weight in head.state_dict().values():
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a sampling without its seed."""
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def record_of(
    samplings: Sequence[Sampling], seed: int, max_new_tokens: int, prompts: list[list[int]]
) -> dict[str, Any]:
    """Return the settings that the rows depend on, with any drafter or server."""
    settings = [settings_of(setting) for setting in samplings]
    return {
        "sampling": settings[0] if len(settings) == 1 else settings,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "rows": len(prompts),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def _clock(made: Generation) -> list[float]:
    """Return the number of decoded tokens, without those of the prefill, and the seconds of decoding."""
    return [sum(len(row) - 1 for row in made.tokens), made.decode_seconds]


def _summary(batches: list[dict]) -> dict[str, Any]:
    def rate(name: str) -> float | None:
        clocks = [batch[name] for batch in batches if batch[name]]
        tokens, seconds = (sum(column) for column in zip(*clocks, strict=True)) if clocks else (0, 0)
        return tokens / seconds if seconds else None

    steps, emitted = (sum(column) for column in zip(*(batch["steps"] for batch in batches), strict=True))
    return {
        "acceptance_length": emitted / steps if steps else None,
        "tokens_per_second": {"speculative": rate("speculative"), "plain": rate("plain")},
        "seconds": sum(batch.get("seconds", 0.0) for batch in batches),
    }


def _is_sharded(model: nn.Module) -> bool:
    """Return whether a forward pass needs other processes, which may decode other rows at another pace."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )
