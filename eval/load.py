"""Clients that ask a server all at once, and what their answers took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random
from typing import Any, TypeVar

from speculator.decoding.sampling import Sampling
from speculator.errors import refuse

Reading = TypeVar("Reading")
_FILLER, _PAUSE = 120.0, 0.1  # seconds that an uncounted request may take, and after a failed one


@dataclass
class Answer:
    """One answer.

    Attributes:
        first: seconds from the request, or from when it was due, to the first token.
        seconds: the same to the last token.
        timings: counts that llama-server adds; {} from others.
    """

    tokens: int
    first: float
    seconds: float
    timings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all clients of a server ask for.

    Attributes:
        rate: requests per second, at random times; None: a client sends its next one right after an answer.
    """

    client: Any  # openai.AsyncOpenAI
    model: str
    sampling: Sampling
    max_new_tokens: int
    rate: float | None = None

    async def answer(self, prompt: list[int], seed: int, due: float) -> Answer:
        """Return a server's answer to one prompt, which was due at this reading of `time.monotonic`."""
        tokens, first, sampling = 0, None, self.sampling
        timings: Mapping[str, Any] = {}
        stream = await self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=self.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
            # Also what the model's own defaults would change.
            extra_body={"top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": 1.0},
        )
        async for event in stream:
            if first is None and event.choices:
                first = time.monotonic() - due
            tokens = event.usage.completion_tokens if event.usage else tokens
            timings = getattr(event, "timings", None) or timings
        tokens = tokens or int(timings.get("predicted_n", 0))
        refuse((first is None or not tokens, "the server sent an answer without tokens, or without their number"))
        assert first is not None
        return Answer(tokens, first, seconds=time.monotonic() - due, timings=timings)

    async def ask(
        self, prompts: Sequence[list[int]], clients: int, read: Callable[[], Awaitable[Reading]] | None = None
    ) -> tuple[list[Answer], Reading | None]:
        """Return the answers to all prompts, in their order, asked by `clients` clients, and a reading of the server.

        With `read`, clients that find no prompt left ask others, uncounted, until the last counted answer has come: the
        load is the same for each of them. The first one calls `read`; None: there was none. No request outlasts this.
        With a `rate` an answer's time begins when its request was due.
        """
        numbers, start, answers, readings = count(), time.monotonic(), dict[int, Answer](), list[Reading]()
        draw = Random(0)
        due = [start + at for at in accumulate(draw.expovariate(self.rate) if self.rate else 0.0 for _ in prompts)]

        async def client() -> None:
            while len(answers) < len(prompts):
                number = next(numbers)
                seed = self.sampling.seed + number
                if number < len(prompts):
                    if self.rate:
                        await asyncio.sleep(due[number] - time.monotonic())
                    began = due[number] if self.rate else time.monotonic()
                    answers[number] = await self.answer(prompts[number], seed, began)
                elif not read:
                    return
                elif number == len(prompts):
                    readings.append(await read())
                else:  # backwards: no cache knows them
                    other = self.answer(prompts[number % len(prompts)][::-1], seed, time.monotonic())
                    try:
                        await asyncio.wait_for(other, _FILLER)
                    except Exception:  # it counts for nothing, so its failure does neither
                        await asyncio.sleep(_PAUSE)

        await asyncio.gather(*(client() for _ in range(clients)))
        return [answers[number] for number in range(len(prompts))], readings[0] if readings else None
