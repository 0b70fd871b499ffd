"""On-policy text: the target continues prompts through the project's own decoder, a head drafting where that pays."""

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
from speculator.decoding.request import Generation, Step, check_prompts
from speculator.decoding.sampling import Sampling
from speculator.device import dtype_name
from speculator.drafters import Drafter, FixedTree, HeadDrafter
from speculator.drafters.adaptive import AdaptiveDrafter
from speculator.drafters.costs import CostTable, entry_from_json, entry_to_json
from speculator.errors import refuse
from speculator.heads import Speculator
from speculator.target.model import Target

BATCH_SIZE = 16
"""Rows that decode at a time. On a CPU more rows give more tokens per second, and a draft adds less to them."""
_PIECE = 4
"""So many times the batch size are the rows of a piece of work, which is made whole or anew: within it rows join as
others end, so only its last ones decode beside empty slots."""
_TIMED_SHARE = 0.02
_TIMED_TOKENS = 64
"""At most this share of the rows, but one batch at least, is decoded twice more, with a draft and without, so far."""
ON_POLICY = Sampling(temperature=1.0)


@dataclass(frozen=True)
class Ends:
    """What ends a row: tokens, and strings."""

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
    keep_refused: bool = False,
    title: str = "generating",
) -> Dataset:
    """Continue prompts by the target, in the distribution that `sampling` names, whoever drafts.

    Row r draws from the stream `seed + r`. The rows are made in pieces, each of which the engine begins anew and whose
    rows join in a fixed order, so they do not depend on interruptions, nor on the number of processes where each has as
    many threads. The same call goes on in an unfinished folder, and gives the rows of a finished one.

    Args:
        target: the model that decides. The processes that hold it together make the same pieces.
        drafter: proposes tokens; None: plain decoding. An adaptive one uses the step costs that the folder records, so
            that a resumed run gives the same rows. With `keep_refused` it always drafts, in its fastest shape.
        prompts: token ids. The longest come first: what does not fit in memory fails soon.
        folder: where the rows and manifest.json come to lie; several processes share it.
        sampling: temperature and its kin; its seed is not used. Of several the rows take each in turn.
        max_new_tokens: the most new tokens a row; a row also ends with EOS, which it keeps, or at the context's end.
        batch_size: rows at a time.
        seed: of the sampling.
        ends: what ends a row; default: the target's own EOS.
        progress: show a bar, with this title.
        keep_refused: keep where drafts were refused.

    Returns:
        Rows {"input_ids": prompt and continuation, "loss_mask": 0 on the prompt, 1 on the continuation}, in the order
        of the prompts; with `keep_refused` also "refused", 1 on each token that took a refused draft's place.
        Beside them manifest.json: {"target", "drafter", "sampling", "seed", "max_new_tokens", "batch_size", "prompts":
        their hash, "rows", "tokens": new ones, "acceptance_length", "tokens_per_second": {"speculative", "plain"},
        "seconds"}: the two speeds clocked on the same few rows, one after the other, without the prefill; the seconds
        of all rows, prefill included, over all processes. An adaptive drafter adds "costs", see `decoding.json`.

    Raises:
        UserError: no prompt, an empty one or one that fills the context; a folder that was made otherwise; a target
            that is sharded over processes in a way of its own.
    """
    refuse(
        (batch_size < 1, f"a batch size of {batch_size} is not at least 1"),
        (max_new_tokens < 1, f"max_new_tokens {max_new_tokens} is not at least 1"),
        (
            target.group is None and _is_sharded(target.model),
            f"{target.name}: sharded over processes that are not known to decode the same rows: see Target.load",
        ),
    )
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
        known = awaited(Path(folder), target.group) or {}
        notes = {"costs": known.get("costs") or [entry_to_json(entry) for entry in drafter.cost.entries]}
        table = CostTable([entry_from_json(entry) for entry in notes["costs"]])
        drafter = AdaptiveDrafter(drafter.head, drafter.choices, drafter.lookup, table)
        if keep_refused:
            drafter.fixed = drafter.fastest(all(setting.greedy for setting in settings), slots)
    samples = min(len(pieces), max(1, int(_TIMED_SHARE * len(prompts)) // batch_size), 2)
    timed = {len(pieces) * i // samples for i in range(samples)} if drafter else set()
    record = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": dtype_name(target.dtype),
        "drafter": identity(drafter),
        **record_of(samplings, seed, max_new_tokens, prompts),
        "batch_size": batch_size,
        **({"keep_refused": True} if keep_refused else {}),
        **({"ends": asdict(ends)} if ends else {}),
    }
    drafting, plain = (Engine(target, who, slots=slots, capacity=longest) for who in (drafter, None))

    def decode(engine: Engine, rows: list[int], count: int) -> Generation:
        engine.forget()
        own, how = zip(*(requests[row] for row in rows), strict=True)
        return engine.generate(own, how, max_new_tokens=count, **stopping)

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
            refused = {"refused": [_refused(row) for row in made.steps]} if keep_refused else {}
            seconds = made.prefill_seconds + made.decode_seconds
            work.write(piece, made.tokens, steps=steps, seconds=seconds, **clocks, **refused)
        return work.finish(prompts, _summary)


def identity(drafter: Drafter | None) -> str | None:
    """Name a drafter and its weights: they decide which random number decides what."""
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
    """Without the seed."""
    return {name: value for name, value in asdict(sampling).items() if name != "seed"}


def record_of(
    samplings: Sequence[Sampling], seed: int, max_new_tokens: int, prompts: list[list[int]]
) -> dict[str, Any]:
    """What continuations depend on, whoever makes them."""
    settings = [settings_of(setting) for setting in samplings]
    return {
        "sampling": settings[0] if len(settings) == 1 else settings,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "rows": len(prompts),
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


def _refused(steps: Sequence[Step]) -> list[int]:
    """Of each new token of a row, 1 where it took a refused draft's place; the first token is the prefill's."""
    marks = [0]
    for step in steps:
        marks += [0] * step.emitted
        marks[-1] = int(step.accepted < step.drafted and not step.cut)
    return marks


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
        "acceptance_length": emitted / steps if steps else None,
        "tokens_per_second": {"speculative": rate("speculative"), "plain": rate("plain")},
        "seconds": sum(batch.get("seconds", 0.0) for batch in batches),
    }


def _is_sharded(model: nn.Module) -> bool:
    """Processes decode batches of their own, at a pace of their own, so no forward pass may need the others."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters()
    )
