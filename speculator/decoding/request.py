"""One text to be continued: its settings, its stop conditions, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from torch import Tensor

from speculator.decoding.sampling import Sampling
from speculator.decoding.streaming import decode, last
from speculator.errors import UserError
from speculator.target.model import Target


@dataclass
class Step:
    """One row's part in one verify pass."""

    drafted: int
    accepted: int
    emitted: int
    """Tokens that reached the text: accepted + 1, or fewer where the text's end cut the step."""
    copied: int = 0
    """Of the accepted ones those of a path that a lookup found, beside a model's own draft."""

    @property
    def cut(self) -> bool:
        return self.emitted <= self.accepted


@dataclass(frozen=True)
class Scores:
    """The log-probability of a token under the target, before temperature and its kin.

    Attributes:
        top: the likeliest tokens there, with theirs.
    """

    logprob: float
    top: list[tuple[int, float]]


def acceptance_length(steps: Iterable[Step]) -> float:
    """Mean of accepted + 1 over the steps that nothing cut; nan where there was none."""
    whole = [step.accepted + 1 for step in steps if not step.cut]
    return sum(whole) / len(whole) if whole else float("nan")


class StopStrings:
    """Tells whether a text has just come to one of the strings.

    Attributes:
        tokens: the special tokens that spell one of them: a text's words are without these.

    Raises:
        UserError: one of them is empty or no string, or there is no tokenizer.
    """

    def __init__(self, strings: str | Sequence[str], tokenizer):
        strings = [strings] if isinstance(strings, str) else strings
        if not isinstance(strings, Sequence) or not all(isinstance(string, str) for string in strings):
            raise UserError(f"stop strings are {strings!r:.60}")
        if not all(strings):
            raise UserError("a stop string is empty")
        if tokenizer is None:
            raise UserError("stop strings need the target's tokenizer")
        self.strings, self.tokenizer = list(strings), tokenizer
        special = ((number, token.content) for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.tokens = {number for number, content in special if content in strings}
        # A token is a byte of text at least; some room for tokens that decode to nothing.
        self.window = max(len(string.encode()) for string in strings) + 8

    def ends(self, tokens: Sequence[int]) -> bool:
        text = decode(self.tokenizer, last(self.tokenizer, tokens, self.window))
        return any(string in text for string in self.strings)


@dataclass(eq=False)
class Request:
    """A prompt and its continuation.

    Attributes:
        prompt: token ids.
        sampling: its `seed` is the request's own stream.
        limit: the most new tokens; `at_limit` is why there are no more.
        eos: tokens that end the text.
        stop: strings that do.
        on_step: called with (new tokens, how many of them were drafted) as they come, the prefill's first.
        logprobs: how many alternatives to give in `scores` with each new token; None: no scores.
        text: prompt and new tokens.
        steps: the verify passes, the prefill left out.
        scores: of the new tokens, where they are asked for.
        finish_reason: "eos", "stop", "length", "context" or "cancelled"; None while it goes on.
    """

    prompt: Sequence[int]
    sampling: Sampling
    limit: int
    at_limit: str = "length"
    eos: Collection[int] = ()
    stop: StopStrings | None = None
    on_step: Callable[[list[int], int], None] | None = None
    logprobs: int | None = None
    text: list[int] = field(init=False)
    steps: list[Step] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self):
        self.text = list(self.prompt)

    @property
    def tokens(self) -> list[int]:
        """The new tokens, EOS included."""
        return self.text[len(self.prompt) :]

    def cancel(self) -> None:
        """End it here, from any thread or from `on_step`; its slot is free before the next step."""
        self.finish_reason = self.finish_reason or "cancelled"

    def take(
        self,
        tokens: Sequence[int],
        drafted: int | None = None,
        scores: Sequence[Scores] | None = None,
        copied: int = 0,
    ) -> None:
        """Append what a step gave, up to the text's end; `drafted` is None for the prefill's token."""
        begin, start, accepted = len(self.text), len(self.prompt), len(tokens) - 1
        for token in tokens:
            self.text.append(token)
            if token in self.eos:
                self.finish_reason = "eos"
            elif self.stop is not None and self.stop.ends(self.text[start:]):
                self.finish_reason = "stop"
            elif len(self.text) - start >= self.limit:
                self.finish_reason = self.at_limit
            if self.finish_reason:
                break
        taken = self.text[begin:]
        if self.logprobs is not None and scores is not None:
            self.scores += [replace(each, top=each.top[: self.logprobs]) for each in scores[: len(taken)]]
        if drafted is not None:
            self.steps.append(Step(drafted, accepted, len(taken), copied))
        if self.on_step:
            self.on_step(taken, min(accepted, len(taken)))


@dataclass
class Generation:
    """What one call of `generate` made, in the order of the prompts.

    Attributes:
        tokens: the new tokens of each row, EOS included, the prompt not.
        steps: the verify passes of each row, the prefill left out.
        prefill_seconds, decode_seconds: wall clock of all prefills and of all steps.
        finish_reasons: see `Request`.
    """

    tokens: list[list[int]]
    steps: list[list[Step]]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reasons: list[str | None] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Over all rows."""
        return acceptance_length(step for row in self.steps for step in row)


def each_sampling(sampling: Sampling | Sequence[Sampling], rows: int) -> list[Sampling]:
    """One for each row: of one for all, row r draws from the stream `seed + r`."""
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


def check_tokens(token_ids: int | Iterable[int]) -> set[int]:
    """One token or several, as transformers takes EOS.

    Raises:
        UserError: they are no integers.
    """
    try:
        return {index(token_ids)} if not isinstance(token_ids, Iterable) else set(map(index, token_ids))
    except TypeError:
        raise UserError(f"eos_token_ids are token ids, not {token_ids!r:.40}") from None


def check_count(max_new_tokens: Any) -> int:
    """The number, if it is one.

    Raises:
        UserError: it is no number of new tokens.
    """
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be an integer from 1 on, got {max_new_tokens!r:.40}")
    return max_new_tokens
