"""The decoding loop: draft, verify in one forward pass, keep what the target would have said.

Plain decoding is this loop without a drafter, so a measured speedup compares like with like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculator.decoding import rules
from speculator.decoding.cache import RowCache
from speculator.decoding.rules import Draft
from speculator.decoding.sampling import Sampling, draw, uniforms
from speculator.drafters.base import Drafter
from speculator.errors import UserError
from speculator.target import Target


@dataclass
class Step:
    """One row's part in one verify pass."""

    drafted: int
    accepted: int
    emitted: int
    """Tokens that reached the text: accepted + 1, or fewer where EOS or the length limit cut the step."""

    @property
    def cut(self) -> bool:
        return self.emitted <= self.accepted


def tokens_per_step(steps: Iterable[Step]) -> float:
    """Mean of accepted + 1 over the steps that nothing cut; nan where there was none."""
    whole = [step.accepted + 1 for step in steps if not step.cut]
    return sum(whole) / len(whole) if whole else float("nan")


@dataclass
class Generation:
    """What one call of `generate` made.

    Attributes:
        tokens: the new tokens of each row, EOS included, the prompt not.
        steps: the verify passes of each row, the prefill left out.
        prefill_seconds, decode_seconds: wall clock of the whole batch.
    """

    tokens: list[list[int]]
    steps: list[list[Step]]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Over all rows."""
        return tokens_per_step(step for row in self.steps for step in row)


@dataclass
class _Rows:
    """What the host knows of a batch in flight."""

    limits: list[int]
    eos: set[int]
    tokens: list[list[int]] = field(default_factory=list)
    steps: list[list[Step]] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)

    def take(self, row: int, new: list[int]) -> int:
        """Append the tokens that EOS and the limit let through; gives how many."""
        new = new[: self.limits[row] - len(self.tokens[row])]
        end = next((i + 1 for i, token in enumerate(new) if token in self.eos), len(new))
        self.tokens[row] += new[:end]
        stopped = end > 0 and new[end - 1] in self.eos
        self.finished[row] = stopped or len(self.tokens[row]) >= self.limits[row]
        return end


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    *,
    max_new_tokens: int = 128,
    ignore_eos: bool = False,
    on_step: Callable[[int, list[int]], None] | None = None,
) -> Generation:
    """Continue prompts. Whatever drafts, the output law is the target's own.

    Args:
        target: the model that decides.
        drafter: who proposes; None decodes plainly.
        prompts: token ids, one list a row, none empty. Rows may differ in length and finish at their own time.
        sampling: temperature and its kin; greedy by default.
        max_new_tokens: the most new tokens per row; a row also ends at the target's context length.
        ignore_eos: go on past EOS, for measurements of equal length.
        on_step: called with (row, new tokens) as they come, the prefill's first token included.

    Raises:
        UserError: no prompt, an empty prompt, or one that fills the target's context.
    """
    sampling = sampling or Sampling()
    device = target.device
    lengths = [len(prompt) for prompt in prompts]
    _check_prompts(target, lengths)
    draft_length = drafter.draft_length if drafter else 0
    limits = [min(max_new_tokens, target.context_length - n) for n in lengths]
    count = len(prompts)
    eos: set[int] = set() if ignore_eos else target.eos_token_ids
    rows = _Rows(limits, eos, [[] for _ in prompts], [[] for _ in prompts], [False] * count)
    seeds = sampling.seed + torch.arange(count, device=device)
    slots = 2 * draft_length + 1
    unused = torch.zeros(count, slots, device=device)
    capacity = max(n + limit for n, limit in zip(lengths, limits, strict=True)) + draft_length + 1
    cache = target.cache(count, capacity)

    started = time.perf_counter()
    pending = _prefill(target, drafter, cache, prompts, sampling, seeds)
    for row, first in enumerate(pending.tolist()):
        rows.take(row, [first])
        if on_step:
            on_step(row, [first])
    decoding = time.perf_counter()
    done = -1
    while not all(rows.finished):
        if sum(rows.finished) != done:
            done = sum(rows.finished)
            alive = torch.tensor([not finished for finished in rows.finished], device=device)
            cache.lengths *= alive  # a finished row writes at its start: nothing reads it again
        # Slots 0..G-1 draw the draft, G..2G-1 test it, 2G draws the token after it.
        u = unused if sampling.greedy else uniforms(seeds, cache.lengths, slots)
        draft = drafter.propose(pending, sampling, u[:, :draft_length]) if drafter else _no_draft(pending)
        step = verify(target, cache, pending, draft, sampling, u[:, draft_length:])
        counts = (step.kept + 1) * alive
        cache.commit(counts, cache.longest + step.tokens.shape[1])
        if drafter:
            drafter.commit(step.tokens, step.hidden, counts)
        pending = step.following
        # The step's one copy to the host: the draft, how much of it was kept, and the token after it.
        packed = torch.cat([draft.tokens, draft.lengths[:, None], step.kept[:, None], pending[:, None]], 1).tolist()
        for row, (*proposed, drafted, accepted, token) in enumerate(packed):
            if not rows.finished[row]:
                before = len(rows.tokens[row])
                emitted = rows.take(row, [*proposed[:accepted], token])
                rows.steps[row].append(Step(drafted, accepted, emitted))
                if on_step:
                    on_step(row, rows.tokens[row][before:])
        # All but the newest token of a row are in the cache.
        cache.longest = max(
            (n + len(rows.tokens[row]) - 1 for row, n in enumerate(lengths) if not rows.finished[row]), default=0
        )
    ended = time.perf_counter()
    return Generation(rows.tokens, rows.steps, decoding - started, ended - decoding)


def _no_draft(pending: Tensor) -> Draft:
    return Draft(pending.new_empty(len(pending), 0), torch.zeros_like(pending))


def _check_prompts(target: Target, lengths: list[int]) -> None:
    if not lengths:
        raise UserError("no prompt to continue")
    if min(lengths) == 0:
        raise UserError(f"prompt {lengths.index(0) + 1} is empty: give it at least one token")
    if max(lengths) >= target.context_length:
        raise UserError(f"a prompt of {max(lengths)} tokens leaves no room in the context of {target.context_length}")


def _prefill(
    target: Target,
    drafter: Drafter | None,
    cache: RowCache,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seeds: Tensor,  # [B]
) -> Tensor:  # [B]
    """Process the prompts and choose each row's first token."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    hidden = target.extend(cache, tokens)
    cache.commit(lengths, longest)
    if drafter:
        drafter.start(tokens, hidden, lengths)
    last = hidden.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
    logits = target.logits(last)
    if sampling.greedy:
        return logits.argmax(-1)
    return draw(sampling.law(logits), uniforms(seeds, torch.zeros_like(lengths), 1)[:, 0])


@dataclass
class Verified:
    """A verify pass: what went through the target, and what the accept rule made of it."""

    tokens: Tensor  # [B, T] the pending token and the draft
    hidden: Tensor  # [B, T, D]
    kept: Tensor  # [B] draft tokens accepted
    following: Tensor  # [B] the token after them


def verify(
    target: Target,
    cache: RowCache,
    pending: Tensor,  # [B] the newest token of each row
    draft: Draft,
    sampling: Sampling,
    u: Tensor,  # [B, ...] the first columns test the draft, the last draws the token after it
) -> Verified:
    """One forward pass over the pending token and its draft. Commits nothing."""
    tokens = torch.cat([pending[:, None], draft.tokens], dim=1)
    hidden = target.extend(cache, tokens)
    logits = target.logits(hidden)
    if sampling.greedy:
        kept, following = rules.greedy(logits.argmax(-1), draft)
    else:
        kept, law = rules.token(sampling.law(logits), draft, u[:, : draft.tokens.shape[1]])
        following = draw(law, u[:, -1])
    return Verified(tokens, hidden, kept, following)
