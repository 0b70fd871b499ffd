"""The engine in a thread of its own, and the way there and back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from speculator.decoding.engine import Engine
from speculator.decoding.request import Request, Scores
from speculator.drafters.adaptive import AdaptiveDrafter

_log = logging.getLogger(__name__)


class EngineError(Exception):
    """The engine failed while the request was in it."""


@dataclass
class News:
    """What a step gave one of a job's requests."""

    index: int
    tokens: list[int]
    scores: list[Scores]
    finish_reason: str | None


@dataclass(eq=False)
class Job:
    """The requests of one call, and what comes of them.

    Attributes:
        seeded: the caller named a seed, so the same text has to come whatever else is in flight.
        deadline: of `time.monotonic`.
    """

    requests: list[Request]
    seeded: bool
    deadline: float
    _news: asyncio.Queue[News | Exception] = field(default_factory=asyncio.Queue)

    async def next(self) -> News:
        """Wait for the next step that gives one of them something.

        Raises:
            asyncio.TimeoutError: the deadline is over.
            EngineError: there will be no more.
        """
        news = await asyncio.wait_for(self._news.get(), max(0.0, self.deadline - time.monotonic()))
        if isinstance(news, Exception):
            raise news
        return news

    def put(self, news: News | Exception) -> None:
        self._news.put_nowait(news)

    def cancel(self) -> None:
        """What has not ended leaves its slot before the next step."""
        for request in self.requests:
            request.cancel()

    @property
    def left(self) -> int:
        """Requests that have not ended."""
        return sum(request.finish_reason is None for request in self.requests)


class Worker:
    """Runs an engine: `submit` and what a job gives belong to the event loop's thread, all else to the engine's.

    Args:
        make: makes the engine; again after it has failed.
    """

    def __init__(self, make: Callable[[], Engine]):
        self._make = make
        self.engine = make()
        self._inbox: list[Job] = []
        self._jobs: list[Job] = []
        self._outbox: list[tuple[Job, News]] = []
        self._stopping = self._broken = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work for the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is in flight gets no further."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def slots(self) -> int:
        return len(self.engine.slots.rows)

    @property
    def in_use(self) -> int:
        """Slots in which a request is."""
        return sum(slot.request is not None for slot in self.engine.slots.rows)

    @property
    def load(self) -> int:
        """Requests that have not ended."""
        with self._wake:
            return sum(job.left for job in [*self._inbox, *self._jobs])

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return max(0, self.load - self.in_use)

    def submit(self, requests: Sequence[Request], seeded: bool, deadline: float) -> Job:
        """Let requests of `Engine.request` be decoded.

        Raises:
            EngineError: there is no engine any more.
        """
        job = Job(list(requests), seeded, deadline)
        for index, request in enumerate(requests):
            request.on_step = partial(self._note, job, index)
        with self._wake:
            if self._broken:
                raise EngineError("it could not be made anew")
            self._inbox.append(job)
            self._wake.notify()
        return job

    # In the engine's thread.

    def _note(self, job: Job, index: int, tokens: list[int], _: int) -> None:
        """`on_step` of a request."""
        request = job.requests[index]
        scores = request.scores[-len(tokens) :] if request.scores else []
        self._outbox.append((job, News(index, tokens, scores, request.finish_reason)))

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._inbox or self.engine.busy)
                if self._stopping:
                    return
                arrived, self._inbox = self._inbox, []
                self._jobs = [job for job in [*self._jobs, *arrived] if job.left]
            try:
                for request in (request for job in arrived for request in job.requests):
                    self.engine.enqueue(request)
                self._reshape()
                self.engine.step()
            except Exception as error:  # memory that ran out, a device that is gone: no request can go on
                _log.exception("the engine failed; it begins anew")
                self._fail(error)
                if self._broken:
                    return
            news, self._outbox = self._outbox, []
            if news:
                self._loop.call_soon_threadsafe(_deliver, news)

    def _reshape(self) -> None:
        """Draft what suits the requests in flight. Which uniform decides what depends on a draft's shape: where a
        sampled request has a seed, all draft as that one would alone."""
        auto = self.engine.drafter
        if isinstance(auto, AdaptiveDrafter):
            seeded = any(job.seeded and not job.requests[0].sampling.greedy for job in self._jobs)
            auto.fixed = auto.alone if seeded else None

    def _fail(self, error: Exception) -> None:
        """Give up what is in flight, and make another engine. Where there can be none, nothing more is taken."""
        self._outbox = []
        try:
            self.engine = self._make()
        except Exception:
            _log.exception("no engine can be made anew: restart the server")
            self._broken = True
        with self._wake:
            lost = self._jobs + (self._inbox if self._broken else [])
            self._jobs, self._inbox = [], [] if self._broken else self._inbox
        for job in lost:
            job.cancel()
            self._loop.call_soon_threadsafe(job.put, EngineError(str(error)))


def _deliver(news: list[tuple[Job, News]]) -> None:
    for job, each in news:
        job.put(each)
