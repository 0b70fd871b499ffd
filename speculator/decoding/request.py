"""A request: a prompt, its settings and its completion."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from numbers import Integral
from operator import index, itemgetter
from typing import Any, TypedDict

from torch import Tensor

from speculator.acceptance import Acceptance, Step
from speculator.decoding.logprobs import TokenLogprobs
from speculator.decoding.sampling import Sampling
from speculator.decoding.streaming import MAX_CONTEXT, decode, decode_after, last
from speculator.errors import UserError
from speculator.target.model import Target
from speculator.target.text import Text, source_of


class StopStrings:
    """Stop strings of a request; `end` returns where a completion ends in which new tokens have completed one of them.

    A stop string counts only if it ends after the completion's first `min_tokens` tokens.

    Args:
        from_prompt: a stop string may begin in the prompt, as in transformers.

    Attributes:
        tokens: special tokens that spell a stop string; decoded text does not contain them.
    """

    def __init__(self, strings: str | Sequence[str], tokenizer, from_prompt: bool = False):
        strings = [strings] if isinstance(strings, str) else strings
        if not isinstance(strings, Sequence) or not all(isinstance(string, str) and string for string in strings):
            raise UserError(f"stop_strings must be non-empty strings, got {strings!r:.60}")
        if tokenizer is None:
            raise UserError("stop_strings need the target's tokenizer")
        self.strings, self.tokenizer, self.from_prompt = list(strings), tokenizer, from_prompt
        special = ((number, token.content) for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.tokens = {number for number, content in special if content in strings}
        # A token is at least one byte of text; 8 more for tokens that decode to nothing.
        # Only the last tokens are decoded again in each step: as many as the longest stop string may span.
        self.window = max(len(string.encode()) for string in strings) + 8
        self._prompt: tuple[Sequence[int], str] | None = None  # its last tokens and their text, once decoded

    def end(self, sequence: Sequence[int], start: int, new: int, min_tokens: int = 0) -> int | None:
        """Return the number of tokens of `sequence` up to the first of the newest that completes a stop string.

        None if none does. The text is decoded once, unless there is a stop string in it.

        Args:
            new: number of the newest tokens, before which no stop string was complete.
        """
        count = len(sequence)
        if not new or count - start <= min_tokens or not self._ends(sequence, start, count, new, min_tokens):
            return None
        earlier = range(max(count - new, start + min_tokens) + 1, count)
        return next((end for end in earlier if self._ends(sequence, start, end, 1, min_tokens)), count)

    def _ends(self, sequence: Sequence[int], start: int, end: int, new: int, min_tokens: int) -> bool:
        """Return whether a stop string is in the text of the tokens before `end`, as far back as `new` ones reach."""
        count = self.window + new - 1
        recent = last(self.tokenizer, sequence[max(start, end - count - 3) : end], count)
        begin = end - len(recent)
        context: tuple[Sequence[int], str] = (), ""
        if begin == start:  # the first token's leading space is part of the text
            before = last(self.tokenizer, sequence[max(0, start - MAX_CONTEXT - 3) : start], MAX_CONTEXT)
            if self._prompt is None or self._prompt[0] != before:
                self._prompt = before, decode(self.tokenizer, before)
            context = self._prompt
        text, early = decode_after(self.tokenizer, recent, *context), 0
        if start + min_tokens > begin:
            # Characters of the first `min_tokens` tokens: a stop string must end after them, but may begin among them.
            early = len(decode_after(self.tokenizer, recent[: start + min_tokens - begin], *context))
        if begin == start and self.from_prompt:
            lead = decode(self.tokenizer, last(self.tokenizer, sequence[:start], self.window))
            text, early = lead + text, early + len(lead)
        return any(text.find(string, max(0, early - len(string) + 1)) >= 0 for string in self.strings)


class EndSettings(TypedDict, total=False):
    """What ends completions, and a callback for new tokens; see `speculator.decoding.engine.generate`."""

    stop_strings: Sequence[str] | StopStrings
    eos_token_ids: int | Collection[int] | None
    on_step: Callable[[int, list[int], int], None] | None


@dataclass(eq=False)
class Request:
    """A prompt and its completion.

    Attributes:
        prompt: token ids that the completion continues, with their source if they have one.
        sampling: temperature, filters and the seed of the request.
        limit_reason: finish reason if the limit is reached: "length" or "context".
        on_step: called with (new tokens, how many of them were drafted) after every step, prefill included, and with
            ([], 0) if the request fails.
        logprobs: number of alternatives in `token_logprobs`; None: no log-probabilities.
        min_tokens: tokens before the completion may end.
        suppressed: token ids that may not be sampled among the first `min_tokens` new tokens.
        steps: verification steps, prefill excluded.
        token_logprobs: log-probabilities of the new tokens, if requested.
        finish_reason: "eos", "stop", "length", "context", "cancelled", "memory" (there is too little), "not_finite"
            (its logits are not), or "failed" if the engine of a server did; None while unfinished.
        failure: what to tell the user if the request failed alone ("memory", "not_finite"); else "".
    """

    prompt: Sequence[int]
    sampling: Sampling
    _: KW_ONLY
    max_new_tokens: int
    limit_reason: str = "length"
    eos: Collection[int] = ()
    stop: StopStrings | None = None
    on_step: Callable[[list[int], int], None] | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    suppressed: Collection[int] = ()
    sequence: list[int] = field(init=False)
    steps: list[Step] = field(default_factory=list)
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    failure: str = ""

    def __post_init__(self):
        self.sequence = Text(self.prompt, source_of(self.prompt))

    @property
    def tokens(self) -> list[int]:
        """The new tokens, EOS included."""
        return self.sequence[len(self.prompt) :]

    @property
    def num_new(self) -> int:
        return len(self.sequence) - len(self.prompt)

    def cancel(self) -> None:
        """End the request, from any thread or from `on_step`. Its slot is free before the next step."""
        self.finish_reason = self.finish_reason or "cancelled"

    def fail(self, reason: str, failure: str) -> None:
        """End the request with a finish reason and the message of `check`, and call `on_step` with ([], 0)."""
        self.finish_reason, self.failure = reason, failure
        if self.on_step:
            self.on_step([], 0)

    def lack_memory(self) -> None:
        self.fail(
            "memory",
            f"too little memory for a prompt of {len(self.prompt)} tokens and {self.max_new_tokens} new ones: shorten "
            "them, or decode fewer at a time",
        )

    def check(self) -> None:
        if self.failure:
            raise UserError(self.failure)

    def append(
        self,
        tokens: Sequence[int],
        drafted: int | None = None,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> None:
        """Append a step's tokens up to the completion's end.

        Args:
            tokens: the accepted draft tokens, then the one that the target sampled.
            drafted: depth of the step's draft; None for the prefill's token.
            logprobs: log-probabilities of `tokens`; None: not computed.
        """
        begin, start, accepted = len(self.sequence), len(self.prompt), len(tokens) - 1
        # A step may bring tokens after the end: a draft that was accepted past EOS. They are dropped, and the step is
        # `cut`.
        reason = None
        for token in tokens:
            self.sequence.append(token)
            if token in self.eos:
                reason = "eos"
            elif self.num_new >= self.max_new_tokens:
                reason = self.limit_reason
            if reason:
                break
        if self.stop is not None:
            end = self.stop.end(self.sequence, start, len(self.sequence) - begin, self.min_tokens)
            if end is not None and (end < len(self.sequence) or reason != "eos"):
                del self.sequence[end:]
                reason = "stop"
        self.finish_reason = reason or self.finish_reason  # another thread may have cancelled it
        # What was really appended: of [x6, EOS, x8] the first two.
        new = self.sequence[begin:]
        if self.logprobs is not None and logprobs is not None:
            self.token_logprobs += [replace(token, top=token.top[: self.logprobs]) for token in logprobs[: len(new)]]
        if drafted is not None:
            self.steps.append(Step(drafted, accepted, len(new)))
        if self.on_step:
            self.on_step(new, min(accepted, len(new)))


@dataclass
class Generation:
    """Completions in the order of the prompts.

    Attributes:
        tokens: new tokens of each row, EOS included.
        steps: verification steps of each row, prefill excluded.
        prefill_seconds, decode_seconds: wall-clock time of all prefills and of all steps.
        finish_reasons, failures, token_logprobs: see `Request`. A row that failed has the tokens before it did.
    """

    tokens: list[list[int]]
    steps: list[list[Step]]
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    finish_reasons: list[str | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    token_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Acceptance length over all rows; 1 without a step."""
        return Acceptance.of(step for row in self.steps for step in row).length

    def check(self) -> Generation:
        """Return these completions if all are whole; raise a UserError, the first failure, if a row has failed."""
        if failure := next(filter(None, self.failures), ""):
            raise UserError(failure)
        return self


def suppressed(requests: Iterable[Request]) -> list[tuple[int, int, list[int]]]:
    """Return the rows with fewer than `min_tokens` new tokens, for masking tokens that would end them too early.

    Each entry is (row, number of tokens that are missing, ids that may not be sampled among these).
    """
    return [
        (row, missing, sorted(each.suppressed))
        for row, each in enumerate(requests)
        if each.min_tokens and (missing := each.min_tokens - each.num_new) > 0
    ]


def max_logprobs(requests: Iterable[Request]) -> int | None:
    return max((request.logprobs for request in requests if request.logprobs is not None), default=None)


def next_seed(seed: int, number: int) -> int:
    """Return the seed of 64 bits that is `number` after another; after the largest comes the smallest."""
    return (seed + number + 2**63) % 2**64 - 2**63


def new_requests(
    target: Target,
    texts: Sequence[Text],  # those of `check_prompts`
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    stop_strings: Sequence[str] | StopStrings = (),
    eos_token_ids: int | Collection[int] | None = None,
    logprobs: int | None = None,
    min_tokens: int = 0,
    on_step: Callable[[int, list[int], int], None] | None = None,
) -> list[Request]:
    """Make a request of each text; raise a UserError for a wrong setting. For the others, see the function `generate`.

    Args:
        logprobs: likeliest tokens to report with each new token's log-probability; None: no log-probabilities.
        min_tokens: tokens before the completion may end; until then, no EOS token is sampled, and stop strings do not
            count.
    """
    samplings = _sampling_per_row(Sampling() if sampling is None else sampling, len(texts))
    limits = _max_new_tokens_per_row(max_new_tokens, len(texts))
    logprobs = None if logprobs is None else as_count("logprobs", logprobs)
    min_tokens = as_count("min_tokens", min_tokens)
    eos = target.eos_token_ids if eos_token_ids is None else as_token_set(eos_token_ids)
    stop: StopStrings | None = None
    if isinstance(stop_strings, StopStrings):
        stop = stop_strings
    elif stop_strings:
        stop = StopStrings(stop_strings, target.tokenizer)
    if stop is not None:  # decoded text does not contain special tokens such as <|im_end|>
        eos = {*eos, *stop.tokens}
    # A tokenizer may have tokens beyond the vocabulary, which have no logits.
    ending = {*target.eos_token_ids, *eos} if min_tokens else ()
    early = {token for token in ending if 0 <= token < target.vocab_size}
    made = []
    for row, (text, own, requested) in enumerate(zip(texts, samplings, limits, strict=True)):
        # Whichever limit is lower ends the completion, and gives its reason.
        room = target.context_length - len(text)
        limit, limit_reason = min((requested, "length"), (room, "context"), key=itemgetter(0))
        request = Request(
            text,
            own,
            max_new_tokens=limit,
            limit_reason=limit_reason,
            eos=eos,
            stop=copy(stop),  # which keeps the text of its prompt's end
            on_step=partial(on_step, row) if on_step else None,
            logprobs=logprobs,
            min_tokens=min_tokens,
            suppressed=early,
        )
        made.append(request)
    return made


def _sampling_per_row(sampling: Sampling | Sequence[Sampling], rows: int) -> list[Sampling]:
    """Return the sampling settings of each row; given one for all, row r gets the seed `seed + r`."""
    if isinstance(sampling, Sampling):
        return [replace(sampling, seed=next_seed(sampling.seed, row)) for row in range(rows)]
    for each in sampling if isinstance(sampling, Sequence) else [sampling]:
        if not isinstance(each, Sampling):
            raise UserError(f"sampling must be a Sampling, got {each!r:.40}")
    if len(sampling) != rows:
        raise UserError(f"sampling: got {len(sampling)} settings for {rows} prompts")
    return list(sampling)


def _max_new_tokens_per_row(max_new_tokens: int | Sequence[int], rows: int) -> list[int]:
    given: Any = max_new_tokens
    limits = list(given) if isinstance(given, list | tuple) else [given] * rows
    if len(limits) != rows:
        raise UserError(f"max_new_tokens: got {len(limits)} numbers for {rows} prompts")
    return [as_count("max_new_tokens", limit, least=1) for limit in limits]


class TooLongError(UserError):
    """Raised for a prompt, the `number`-th, of more than `longest` tokens, which is as much as the target can read."""

    def __init__(self, number: int, length: int, longest: int, target: str):
        super().__init__(f"prompt {number} has {length} tokens; the context of {target} has room for {longest}")
        self.number, self.length, self.longest = number, length, longest


def check_prompts(target: Target, prompts: Sequence[Sequence[int]] | Tensor) -> list[Text]:
    """Return the texts of prompts; raise a UserError for one that is empty, too long or of unknown tokens."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or not hasattr(prompts, "__iter__"):
        raise UserError(f"prompts must be lists of token ids, got {prompts!r:.40}")
    if not len(prompts):
        raise UserError("no prompts given")
    lists = [_as_list(number, prompt) for number, prompt in enumerate(prompts, start=1)]
    for number, prompt in enumerate(lists, start=1):
        if not prompt:
            raise UserError(f"prompt {number} is empty: give it at least one token")
        if min(prompt) < 0 or max(prompt) >= target.vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            raise UserError(
                f"prompt {number}: {target.name} has no token {token!s:.40}, only 0..{target.vocab_size - 1}"
            )
        context, room = (target.context_length, 1) if isinstance(prompt, Text) else target.room(1)
        if len(prompt) > (longest := context - room):
            raise TooLongError(number, len(prompt), longest, target.name)
    return [target.text(prompt) for prompt in lists]


def as_text(target: Target, prompt: Sequence[int]) -> Text:
    return prompt if isinstance(prompt, Text) else check_prompts(target, [prompt])[0]


def _as_list(number: int, prompt: Any) -> list[int]:
    """Return a prompt of integers as a list; raise a UserError, which names its `number` from 1, for other types."""
    if isinstance(prompt, Text):
        return prompt
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        if isinstance(listed, list | tuple | range) and not any(isinstance(token, bool) for token in listed):
            return [index(token) for token in listed]
    except TypeError:
        pass
    raise UserError(f"prompt {number} is not a list of token ids: {prompt!r:.40}")


def as_token_set(token_ids: int | Iterable[int]) -> set[int]:
    try:
        return {index(token_ids)} if not isinstance(token_ids, Iterable) else set(map(index, token_ids))
    except TypeError:
        raise UserError(f"eos_token_ids must be token ids, got {token_ids!r:.40}") from None


def as_count(name: str, value: Any, least: int = 0) -> int:
    """Return a number of tokens as Python's integer; raise a UserError, which calls it `name`, for anything else."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be an integer >= {least}, got {value!r:.40}")
    return int(value)
