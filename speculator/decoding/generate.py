"""The decoding loop: draft, verify in one forward pass, keep what the target would have said.

Plain decoding is this loop without a drafter, so a measured speedup compares like with like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from speculator.decoding.draft import take_at
from speculator.decoding.rules import RULES, Rule
from speculator.decoding.sampling import RowSampling, Sampling, draw, uniforms
from speculator.decoding.session import Session
from speculator.decoding.step import DeviceStep, prepare
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

    prompts: list[list[int]]
    limits: list[int]
    eos: set[int]
    stop: _StopStrings | None
    texts: list[list[int]] = field(init=False)
    steps: list[list[Step]] = field(init=False)
    finished: list[bool] = field(init=False)

    def __post_init__(self):
        self.texts = [list(prompt) for prompt in self.prompts]
        self.steps = [[] for _ in self.prompts]
        self.finished = [False] * len(self.prompts)

    def new(self, row: int) -> list[int]:
        return self.texts[row][len(self.prompts[row]) :]

    def take(self, row: int, tokens: list[int]) -> list[int]:
        """Append the tokens that EOS, stop strings and the limit let through; gives those."""
        text, start = self.texts[row], len(self.prompts[row])
        taken: list[int] = []
        for token in tokens:
            text.append(token)
            taken.append(token)
            ended = token in self.eos or (self.stop is not None and self.stop.ends(text[start:]))
            if ended or len(text) - start >= self.limits[row]:
                self.finished[row] = True
                break
        return taken


class _StopStrings:
    """Tells whether a text has just come to one of the strings."""

    def __init__(self, strings: Sequence[str], tokenizer):
        if not all(strings):
            raise UserError("a stop string is empty")
        if tokenizer is None:
            raise UserError("stop strings need the target's tokenizer")
        self.strings, self.tokenizer = strings, tokenizer
        # A token is a byte of text at least; some room for tokens that decode to nothing.
        self.window = max(len(string.encode()) for string in strings) + 8

    def ends(self, tokens: list[int]) -> bool:
        text = self.tokenizer.decode(tokens[-self.window :], skip_special_tokens=True)
        return any(string in text for string in self.strings)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    rule: str | None = None,
    max_new_tokens: int = 128,
    stop_strings: Sequence[str] = (),
    eos_token_ids: Collection[int] | None = None,
    session: Session | None = None,
    on_step: Callable[[int, list[int], int], None] | None = None,
) -> Generation:
    """Continue prompts. Whatever drafts, the output law is the target's own, unless a rule called lossy is asked for.

    Args:
        target: the model that decides.
        drafter: who proposes; None decodes plainly.
        prompts: token ids, one list or 1-D tensor a row, none empty. Rows may differ in length and finish at their own
            time.
        sampling: temperature and its kin, greedy by default: one for each row, or one for all, whose row r then draws
            from the stream `seed + r`.
        rule: a name from `speculator.decoding.rules.RULES` that fits the drafter; by default the drafter's own. At
            temperature 0 all are the greedy rule.
        max_new_tokens: the most new tokens per row; a row also ends at the target's context length.
        stop_strings: a row ends with the token that completes one of them.
        eos_token_ids: tokens that end a row, by default the target's own; none for measurements of equal length.
        session: keeps the cache for the next call, see `Session`, and on a CUDA device captures steps as graphs.
        on_step: called with (row, new tokens, how many of them were drafted) as they come, the prefill's first.

    Raises:
        UserError: no prompt, an empty prompt, one that fills the target's context or holds what is no token of it; a
            rule that is unknown or does not fit the drafter; not one sampling for each row; no new token asked for.
    """
    accept = _rule(drafter, rule)
    prompts = check_prompts(target, prompts)
    settings = _each(sampling or Sampling(), len(prompts))
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be an integer from 1 on, got {max_new_tokens!r:.40}")
    limits = [min(max_new_tokens, target.context_length - len(prompt)) for prompt in prompts]
    eos = target.eos_token_ids if eos_token_ids is None else set(eos_token_ids)
    stop = _StopStrings(stop_strings, target.tokenizer) if stop_strings else None
    rows = _Rows([list(prompt) for prompt in prompts], limits, eos, stop)
    laws = RowSampling(settings, target.device)
    once, session = session is None, session or Session(target)

    started = time.perf_counter()
    # A finished row may end past its limit by a draft, and goes on writing there.
    room = max(limits) + 2 * ((drafter.nodes if drafter else 0) + 1)
    hidden, counts = session.prefill(rows.texts, room)
    if drafter:
        drafter.start(rows.texts, hidden, counts, session.cache)
    # A single call is over before captures pay.
    step = (DeviceStep if once else prepare)(target, session, drafter, accept, laws)
    step.pending.copy_(first_token(target, hidden, counts, laws))
    for row, first in enumerate(step.pending.tolist()):
        taken = rows.take(row, [first])
        if on_step:
            on_step(row, taken, 0)
    decoding = time.perf_counter()
    done = 0
    while not all(rows.finished):
        if sum(rows.finished) != done:
            done = sum(rows.finished)
            step.alive.copy_(torch.tensor([not finished for finished in rows.finished]))
        packed = step(rows.texts).tolist()  # the step's one copy to the host
        for row, (*path, drafted, accepted, token) in enumerate(packed):
            if not rows.finished[row]:
                taken = rows.take(row, [*path[:accepted], token])
                rows.steps[row].append(Step(drafted, accepted, len(taken)))
                if on_step:
                    on_step(row, taken, min(accepted, len(taken)))
        # All but the newest token of a row are in the cache.
        session.cache.reach(
            max((len(t) - 1 for t, end in zip(rows.texts, rows.finished, strict=True) if not end), default=0)
        )
    ended = time.perf_counter()
    session.texts = [text[:-1] for text in rows.texts]
    return Generation([rows.new(r) for r in range(len(prompts))], rows.steps, decoding - started, ended - decoding)


def _rule(drafter: Drafter | None, name: str | None) -> Rule:
    fitting = drafter.rules if drafter else tuple(RULES)
    name = name or fitting[0]
    if name not in RULES:
        raise UserError(f"no accept rule {name!r}: there are {', '.join(RULES)}")
    if name not in fitting:
        raise UserError(f"the rule {name!r} does not fit what this drafter drafts; these do: {', '.join(fitting)}")
    return RULES[name]


def _each(sampling: Sampling | Sequence[Sampling], rows: int) -> list[Sampling]:
    if isinstance(sampling, Sampling):
        return [replace(sampling, seed=sampling.seed + row) for row in range(rows)]
    if len(sampling) != rows:
        raise UserError(f"{len(sampling)} sampling settings for {rows} prompts")
    return list(sampling)


def check_prompts(target: Target, prompts: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """The prompts as lists, refusing those that can't be continued.

    Raises:
        UserError: there is none, or one is empty, as long as the target's context, or no list of its tokens.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__iter__"):
        raise UserError(f"prompts are lists of token ids, not {prompts!r:.40}")
    if not len(prompts):
        raise UserError("no prompt to continue")
    lists = [_tokens(number, prompt) for number, prompt in enumerate(prompts, start=1)]
    for number, prompt in enumerate(lists, start=1):
        if not prompt:
            raise UserError(f"prompt {number} is empty: give it at least one token")
        if min(prompt) < 0 or max(prompt) >= target.vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            raise UserError(f"prompt {number}: {target.name} has no token {token}, only 0..{target.vocab_size - 1}")
        if len(prompt) >= target.context_length:
            raise UserError(
                f"prompt {number} of {len(prompt)} tokens leaves no room in the context of {target.context_length}"
            )
    return lists


def _tokens(number: int, prompt: Any) -> list[int]:
    """A prompt as a list: what a tokenizer gives, a list, tuple, array or tensor of integers."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        if isinstance(listed, list | tuple | range) and not any(isinstance(token, bool) for token in listed):
            return [index(token) for token in listed]
    except TypeError:
        pass
    raise UserError(f"prompt {number} is not a list of token ids: {prompt!r:.40}")


def first_token(target: Target, hidden: Tensor, counts: Tensor, sampling: RowSampling) -> Tensor:  # [B]
    """Each row's first new token, from the prompt's last hidden state."""
    logits = target.logits(take_at(hidden, counts - 1))
    if sampling.greedy:
        return logits.argmax(-1)
    return draw(sampling.law(logits), uniforms(sampling.seeds, torch.zeros_like(counts), 1)[:, 0])
