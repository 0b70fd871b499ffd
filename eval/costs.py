"""c and v: what a drafted token and a verify pass cost, in units of one plain step.

They are measured on real steps, apart from any timed generation: behind the same text, in the same cache, with the
same batch, a few plain steps and a few with a draft take turns. (A few, because a step that follows one of another kind
is slower than one of many alike, as they are in the loop.) A plain step and a verify pass hold all that the loop does
in them: forward pass, law, rule, next token, commit, the copy to the host and its text. A draft includes what the
drafter does to learn which of its tokens were kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from eval.speed import synchronize
from speculator.decoding.draft import Draft
from speculator.decoding.generate import first_token
from speculator.decoding.graphs import Captured
from speculator.decoding.rules import RULES
from speculator.decoding.sampling import RowSampling, Sampling
from speculator.decoding.session import Session
from speculator.decoding.step import DeviceStep, Verified, capturable
from speculator.drafters import Drafter
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
) -> Iterator[tuple[Draft, Verified]]:
    """Go on from `prompts` by `count` steps, as the loop does; gives each step's draft and result.

    Before every `BLOCK` steps as many plain ones are taken, and taken back: they leave nothing but their seconds. The
    first of either kind warms up; a block in which steps were captured does not count. The context's end is no end:
    positions stop there, time does not care.
    """
    depth, texts = drafter.draft_length, [list(prompt) for prompt in prompts]
    session, rule = Session(target), RULES[drafter.rules[0]]
    seeds = range(sampling.seed, sampling.seed + len(prompts))
    laws = RowSampling([Sampling(sampling.temperature, seed=seed) for seed in seeds], target.device)
    hidden, counts = session.prefill(texts, room=count * (depth + 1) + BLOCK + drafter.nodes + 2)
    cache = session.cache
    drafter.start(texts, hidden, counts, cache)
    alone, step = (
        DeviceStep(target, session, who, rule, laws, captured=capturable(target, who)) for who in (None, drafter)
    )
    propose, verify, learn = map(step.part, (DeviceStep.propose, DeviceStep.verify, DeviceStep.learn))
    step.pending.copy_(first_token(target, hidden, counts, laws))
    for text, token in zip(texts, step.pending.tolist(), strict=True):
        text.append(token)

    def tell(told: Tensor) -> None:
        for text, (*path, _, accepted, token) in zip(texts, told.tolist(), strict=True):
            text += [*path[:accepted], token]
        cache.reach(max(map(len, texts)) - 1)

    def plain_steps() -> float:
        """Seconds of a block, without its first step."""
        lengths, longest = cache.lengths.clone(), cache.longest
        alone.pending.copy_(step.pending)
        seconds = [clock(lambda: tell(alone(texts)))[0] for _ in range(BLOCK)]
        cache.lengths.copy_(lengths)
        cache.longest = longest
        for text in texts:
            del text[-BLOCK:]
        return sum(seconds[1:])

    plain, sums, prepared = 0.0, [0.0, 0.0], 0
    for number in range(count):
        place = number % BLOCK
        if place == 0:
            prepared = Captured.prepared
            plain, sums = plain_steps(), [0.0, 0.0]
        drafting, (draft, u) = clock(propose, texts)
        verifying, result = clock(verify, draft, u)
        learning, _ = clock(learn, result)
        telling, _ = clock(tell, result.told)
        if place:
            sums = [sums[0] + drafting + learning, sums[1] + verifying + telling]
        if place == BLOCK - 1 and Captured.prepared == prepared:
            for part, seconds in zip((costs.plain, costs.draft, costs.verify), (plain, *sums), strict=True):
                part.append(seconds)
        yield draft, result


def measure(
    target: Target, drafter: Drafter, prompts: list[list[int]], sampling: Sampling, blocks: int, costs: Costs
) -> None:
    """Add the seconds of about `blocks` blocks of steps behind `prompts`."""
    captures = 2 if capturable(target, drafter) else 0  # when they begin, and when they outgrow a bucket
    for _ in walk(target, drafter, prompts, sampling, (blocks + captures) * BLOCK, costs):
        pass


def clock(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    """Seconds of a call, of what it starts on the device included, and what it gives."""
    synchronize()
    started = time.perf_counter()
    result = work(*given)
    synchronize()
    return time.perf_counter() - started, result
