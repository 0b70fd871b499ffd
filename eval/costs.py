"""c and v: what a drafted token and a verify pass cost, in units of one plain step.

They are measured on real steps, apart from any timed generation: behind the same text, in the same cache, with the
same batch, a few plain steps and a few with a draft take turns. (A few, because a step that follows one of another kind
is slower than one of many alike, as they are in the loop.) A plain step and a verify pass hold all that the loop does
in them: forward pass, distribution, rule, next token, the copy to the host and its text. A draft includes what is done
to keep what was accepted of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from eval.timing import synchronize
from speculator.cuda_graphs import Captured, capturable
from speculator.draft import Draft
from speculator.drafters import Drafter
from speculator.engine import Engine, Verified
from speculator.request import Request
from speculator.sampling import Sampling
from speculator.slots import JOINING
from speculator.target import Target

Result = TypeVar("Result")
BLOCK = 5
"""Steps of one kind in a row: the first is not counted."""


@dataclass
class Costs:
    """Seconds of the parts of steps, in sums over blocks of as many plain steps and steps with a draft.

    Attributes:
        plain: of plain steps.
        draft: of drafting, what is learnt of the draft's fate included.
        verify: of verify passes.
    """

    plain: list[float] = field(default_factory=list)
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)

    def figures(self, draft_length: int) -> dict[str, float]:
        """c, per token of a whole draft, and v, of the mean verify pass.

        Of each block the ratio to its own plain steps, which found the machine in the same mood, and of those the mean
        of the middle half: a stall spoils one block.
        """
        drafting = _middle(draft / plain for draft, plain in zip(self.draft, self.plain, strict=True))
        return {
            "draft_over_decode": drafting / draft_length,
            "verify_over_decode": _middle(
                verify / plain for verify, plain in zip(self.verify, self.plain, strict=True)
            ),
            "decode_seconds": _middle(self.plain) / (BLOCK - 1),
        }


def _middle(values: Iterable[float]) -> float:
    """The mean without the lowest and the highest quarter."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


@torch.inference_mode()
def walk(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    sampling: Sampling,
    count: int,
    costs: Costs,
    rule: str | None = None,
) -> Iterator[tuple[Draft, Verified]]:
    """Go on from `prompts` by `count` steps, as the engine does; gives each step's draft and result.

    Before every `BLOCK` steps as many plain ones are taken, and taken back: they leave nothing but their seconds. The
    first of either kind warms up; a block in which steps were captured does not count. The context's end is no end:
    positions stop there, time does not care.
    """
    limit = count * (drafter.draft_length + 1) + BLOCK + 2
    engine = Engine(target, drafter, slots=len(prompts), rule=rule)
    own = [Sampling(sampling.temperature, seed=sampling.seed + row) for row in range(len(prompts))]
    requests = [engine.enqueue(Request(*row, limit)) for row in zip(prompts, own, strict=True)]
    engine.admit()
    while any(slot.phase == JOINING for slot in engine.slots.rows):
        engine.prefill()
    cache, who, capturing = engine.cache, engine.drafter, engine.capturing
    plainly, propose, verify, keep = map(engine.part, ("_step", "draft", "verify", "keep"))

    def plain_steps() -> float:
        """Seconds of a block, without its first step."""
        lengths, pending = cache.lengths.clone(), engine.pending.clone()
        engine.drafter, engine.capturing = None, capturable(target, None)
        seconds = [clock(lambda: engine.tell(plainly(engine.ready()).tolist()))[0] for _ in range(BLOCK)]
        engine.drafter, engine.capturing = who, capturing
        cache.lengths.copy_(lengths)
        engine.pending.copy_(pending)
        for request in requests:
            del request.text[-BLOCK:]
        return sum(seconds[1:])

    plain, sums, prepared = 0.0, [0.0, 0.0], 0
    for number in range(count):
        place = number % BLOCK
        if place == 0:
            prepared = Captured.prepared
            plain, sums = plain_steps(), [0.0, 0.0]
        texts = engine.ready()
        drafting, (draft, u) = clock(propose, texts)
        verifying, result = clock(verify, draft, u)
        learning, _ = clock(keep, result)
        telling, _ = clock(lambda report: engine.tell(report.tolist()), result.report)
        if place:
            sums = [sums[0] + drafting + learning, sums[1] + verifying + telling]
        if place == BLOCK - 1 and Captured.prepared == prepared:
            for part, seconds in zip((costs.plain, costs.draft, costs.verify), (plain, *sums), strict=True):
                part.append(seconds)
        yield draft, result


def measure(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    sampling: Sampling,
    blocks: int,
    costs: Costs,
    rule: str | None = None,
) -> None:
    """Add the seconds of about `blocks` blocks of steps behind `prompts`."""
    captures = 3 if capturable(target, drafter) else 0  # when they begin, and when they outgrow a bucket
    for _ in walk(target, drafter, prompts, sampling, (blocks + captures) * BLOCK, costs, rule):
        pass


def clock(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    """Seconds of a call, of what it starts on the device included, and what it gives."""
    synchronize()
    started = time.perf_counter()
    result = work(*given)
    synchronize()
    return time.perf_counter() - started, result
