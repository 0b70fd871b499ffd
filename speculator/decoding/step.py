"""One step of the decoding loop, as far as the device goes: draft, verify, keep, and what the host is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculator.decoding import graphs, rules
from speculator.decoding.draft import Draft
from speculator.decoding.graphs import Captured, CaptureError
from speculator.decoding.rules import Rule
from speculator.decoding.sampling import RowSampling, draw, uniforms
from speculator.decoding.session import Session
from speculator.drafters.base import Drafter, Texts
from speculator.target import Target

_KEPT = 32  # steps of a session


@dataclass
class Verified:
    """A verify pass: what went through the target on the path that was kept, and what the accept rule made of it."""

    tokens: Tensor  # [B, depth + 1] the pending token and the path
    hidden: Tensor  # [B, depth + 1, D]
    drafted: Tensor  # [B] the depth of the draft
    kept: Tensor  # [B] draft tokens accepted
    following: Tensor  # [B] the token after them

    def __post_init__(self):
        columns = (self.drafted, self.kept, self.following)
        # What the host is told: the path, how much was drafted and kept, and the token after it.
        self.told = torch.cat([self.tokens[:, 1:], *(column[:, None] for column in columns)], 1)  # [B, depth + 3]


class DeviceStep:
    """Call it, and every row goes on by one step.

    Whatever lasts from one step to the next is a tensor that is updated in place: `pending`, `alive`, the cache, the
    drafter's own. No part asks the device. So on a CUDA device the step is captured, once for each `cache.longest`
    (`speculator.decoding.graphs`), unless the target's code or the drafter needs the host.

    Attributes:
        pending: [B] the newest token of each row: sampled, not yet processed by the target.
        alive: [B] bool: the rows that are not finished.
        captured: whether steps are captured.
    """

    def __init__(
        self,
        target: Target,
        session: Session,
        drafter: Drafter | None,
        accept: Rule,
        laws: RowSampling,
        captured: bool = False,
    ):
        self.target, self.cache, self.drafter, self.accept, self.laws = target, session.cache, drafter, accept, laws
        self.pending = torch.zeros_like(self.cache.lengths)
        self.alive = torch.ones_like(self.pending, dtype=torch.bool)
        self.captured = captured
        self.buffers = self._buffers()
        self._pool = session.pool
        self._all = Captured(DeviceStep._advance, self._pool)

    def __call__(self, texts: Texts) -> Tensor:  # [B, depth + 3], see `Verified`
        return self._run(self._all, texts)

    def part(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """One of this class's methods as the step runs it: captured where steps are."""
        work = Captured(method, self._pool)
        return lambda *given: self._run(work, *given)

    def _run(self, work: Captured, *given: Any) -> Any:
        # What is captured must not hold the step: in a cycle the cache would wait for the garbage collector.
        if self.captured:
            try:
                with graphs.on(self.cache.lengths.device):
                    return work(self.cache.longest, self, *given)
            except CaptureError as error:
                self.captured = (self.drafter or self.target).capturable = False
                warnings.warn(f"steps are not captured as CUDA graphs, so they are slower: {error}", stacklevel=2)
        return work.work(self, *given)

    def _advance(self, texts: Texts) -> Tensor:
        verified = self.verify(*self.propose(texts))
        self.learn(verified)
        return verified.told

    def propose(self, texts: Texts) -> tuple[Draft, Tensor]:
        """The draft, and the uniforms [B, n + 1] for `verify`: one tests each of its tokens, the last draws the next.

        Slots 0..n-1 of a step draw the draft, n..2n-1 test it, 2n draws the token after it.
        """
        nodes, laws = self.drafter.nodes if self.drafter else 0, self.laws
        slots = 2 * nodes + 1
        if laws.greedy:
            u = laws.temperature.new_zeros(len(self.pending), slots)  # nobody draws
        else:
            u = uniforms(laws.seeds, self.cache.lengths, slots)
        draft = Draft.none(self.pending)
        if self.drafter:
            draft = self.drafter.propose(self.pending, laws, u[:, :nodes], texts)
        return draft, u[:, nodes:]

    def verify(self, draft: Draft, u: Tensor) -> Verified:
        """One forward pass over the pending token and its draft; what is accepted stays, in the rows that are alive."""
        verified = self._judged(draft, u)
        self.cache.commit(self._counts(verified))
        self.pending.copy_(verified.following)
        return verified

    def learn(self, verified: Verified) -> None:
        """Tell the drafter."""
        if self.drafter:
            self.drafter.commit(verified.tokens, verified.hidden, self._counts(verified))

    def _counts(self, verified: Verified) -> Tensor:  # [B] tokens that each row goes on by
        return (verified.kept + 1) * self.alive

    def _judged(self, draft: Draft, u: Tensor) -> Verified:
        """The kept path lies first in the cache, uncommitted."""
        tokens = torch.cat([self.pending[:, None], draft.tokens], dim=1)
        hidden = self.target.extend(self.cache, tokens, None if draft.parents is None else draft)
        logits = self.target.logits(hidden)
        if self.laws.greedy:
            last, following = rules.greedy(logits.argmax(-1), draft)
        else:
            last, law = self.accept(self.laws.law(logits), draft, u[:, : draft.tokens.shape[1]])
            following = draw(law, u[:, -1])
        if draft.parents is None:
            return Verified(tokens, hidden, draft.lengths, last, following)
        path = draft.path(last)
        self.cache.gather(path)
        kept = draft.depths.gather(1, last[:, None])[:, 0]
        hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return Verified(tokens.gather(1, path), hidden, draft.longest, kept, following)

    def _buffers(self) -> list[Tensor | None]:
        return [*self.cache.buffers, *(self.drafter.buffers if self.drafter else ())]

    def fits(self) -> bool:
        """Whether all that was captured still is where it was."""
        now = self._buffers()
        return len(now) == len(self.buffers) and all(a is b for a, b in zip(now, self.buffers, strict=True))


def capturable(target: Target, drafter: Drafter | None) -> bool:
    """Whether steps run as graphs: on a device that can, where neither the target's code nor the drafter needs the
    host."""
    return target.device.type in graphs.DEVICES and target.capturable and (drafter is None or drafter.capturable)


def prepare(target: Target, session: Session, drafter: Drafter | None, accept: Rule, laws: RowSampling) -> DeviceStep:
    """The step of a generation whose prefill is done and whose drafter has started.

    A session keeps the steps that are captured, for generations with the same drafter, rule and kind of sampling.
    """
    if not capturable(target, drafter):
        return DeviceStep(target, session, drafter, accept, laws)
    key = (id(drafter), accept, laws.kind)  # a step that is kept keeps its drafter, so no other has that id
    step = session.steps.get(key)
    if step is None or not step.fits():
        step = session.steps[key] = DeviceStep(target, session, drafter, accept, laws, captured=True)
        if len(session.steps) > _KEPT:
            session.steps.pop(next(iter(session.steps)))
    step.laws.copy_(laws)
    step.alive.fill_(True)
    return step
