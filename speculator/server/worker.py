"""A thread that runs the engine, and the queues between it and the event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from speculator.decoding.drafter import Drafter
from speculator.decoding.engine import Engine
from speculator.decoding.logprobs import TokenLogprobs
from speculator.decoding.request import Request
from speculator.errors import UserError, first_line
from speculator.server.errors import APIError
from speculator.server.metrics import Traffic

_log = logging.getLogger(__name__)
_FAILED = "the engine failed: the server's log has the reason"
_TOO_LARGE = "too little memory for this request: shorten the prompt or lower max_tokens"


@dataclass
class StepOutput:
    """What a step added to one request of a job.

    Attributes:
        index: number of the request in the job.
        logprobs: one entry per new token; empty unless requested.
        finish_reason: see `Request`; None while unfinished.
    """

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None


@dataclass(eq=False)
class Job:
    """The decoding `requests` of one HTTP request, one per answer, and the queue of their outputs."""

    requests: list[Request]
    _outputs: asyncio.Queue[StepOutput | APIError] = field(default_factory=asyncio.Queue)

    async def next_output(self) -> StepOutput:
        """Wait for the next output of any request; raises an APIError if the engine failed or memory ran out."""
        output = await self._outputs.get()
        if isinstance(output, APIError):
            raise output
        return output

    def put(self, output: StepOutput | APIError) -> None:
        """Queue an output, or an error that `next_output` raises, in the event loop's thread."""
        self._outputs.put_nowait(output)

    def cancel(self) -> None:
        """Cancel all unfinished requests; their slots are free before the next step."""
        for request in self.requests:
            request.cancel()

    def waits(self, waiting: Container[Request]) -> bool:
        """Return whether all unfinished requests are in `waiting`, those without a slot, and none has tokens yet."""
        return all(each in waiting and not each.num_new for each in self.requests if each.finish_reason is None)

    @property
    def unfinished(self) -> int:
        return sum(request.finish_reason is None for request in self.requests)


class Worker:
    """Runs an engine in a thread.

    The worker's thread alone changes the engine. The event loop's thread calls `submit`, reads the jobs and counts
    slots.

    Args:
        make_engine: creates the engine with a drafter, and a new one after a failure.
        drafter: drafter to start with; None: plain decoding.

    Attributes:
        traffic: what the engine has done.
        head_loads: number of times that the drafter was replaced.
    """

    def __init__(
        self, make_engine: Callable[[Drafter | None], Engine], drafter: Drafter | None = None, head: str | None = None
    ):
        self._make_engine, self._drafter, self.head = make_engine, drafter, head
        self.engine = make_engine(drafter)
        self._submitted: list[Job] = []
        self._loads: list[tuple[Callable[[], Drafter], Future[None]]] = []
        self._jobs: list[Job] = []
        self._outputs: list[tuple[Job, StepOutput | APIError]] = []
        self._stopping = self._broken = False
        self.traffic = Traffic()
        self.head_loads = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def slots(self) -> int:
        return len(self.engine.scheduler.slots)

    @property
    def in_use(self) -> int:
        return sum(slot.request is not None for slot in self.engine.scheduler.slots)

    @property
    def load(self) -> int:
        """Number of unfinished requests, in slots or waiting."""
        with self._wake:
            return sum(job.unfinished for job in [*self._submitted, *self._jobs])

    @property
    def queued(self) -> int:
        return max(0, self.load - self.in_use)

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue requests and return their job. Raises an APIError if the engine is broken."""
        job = Job(list(requests))
        for index, request in enumerate(requests):
            request.on_step = partial(self._collect, job, index)
        with self._wake:
            if self._broken:
                raise APIError(_FAILED, status=500)
            self._submitted.append(job)
            self._wake.notify()
        return job

    async def replace_drafter(self, make_drafter: Callable[[], Drafter]) -> None:
        """Replace the drafter between two steps; raise a UserError or APIError if that fails and the old one stays.

        The worker's thread calls `make_drafter`, and decoding pauses meanwhile.
        """
        loaded: Future[None] = Future()
        with self._wake:
            if self._broken:
                raise APIError(_FAILED, status=500)
            self._loads.append((make_drafter, loaded))
            self._wake.notify()
        await asyncio.wrap_future(loaded)

    # ---- in the worker's thread

    def _collect(self, job: Job, index: int, tokens: list[int], _: int) -> None:
        """Collect the new tokens of request `index` of a job for delivery after the step: the request's `on_step`."""
        request = job.requests[index]
        self.traffic.count(request, len(tokens))
        if request.finish_reason == "memory":
            self._outputs.append((job, APIError(_TOO_LARGE, code="out_of_memory")))
            return
        if request.failure:
            self._outputs.append((job, APIError(request.failure, status=500, code=request.finish_reason)))
            return
        # Taken out of the request: a stream sends them, and two kilobytes per token would stay until its end.
        logprobs, request.token_logprobs = request.token_logprobs, []
        self._outputs.append(
            (job, StepOutput(index=index, tokens=tokens, logprobs=logprobs, finish_reason=request.finish_reason))
        )

    def _run(self) -> None:
        """Decode until `stop` is called, or until the engine fails and can't be created again."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._submitted or self._loads or self.engine.busy)
                if self._stopping:
                    return
                # Take all that has arrived and let go of the lock: the event loop must never wait for a step.
                submitted, self._submitted = self._submitted, []
                loads, self._loads = self._loads, []
                self._jobs = [job for job in [*self._jobs, *submitted] if job.unfinished]
            try:
                # Between two steps: a step in flight keeps the drafter with which it began.
                while loads:
                    self._replace_drafter(*loads.pop(0))
                for request in (request for job in submitted for request in job.requests):
                    self.engine.enqueue(request)
                self.engine.step()
            except Exception as error:  # out of memory, or the device is lost: no request can continue
                _log.exception("the engine failed and is created again")
                with self._wake:
                    self._loads = loads + self._loads
                self._restart(str(error) if isinstance(error, UserError) else _FAILED)
                if self._broken:
                    return
            outputs, self._outputs = self._outputs, []
            if outputs:
                # Once per step for all requests: waking the event loop costs more than putting a few items into queues.
                self._loop.call_soon_threadsafe(_deliver, outputs)

    def _replace_drafter(self, make_drafter: Callable[[], Drafter], loaded: Future[None]) -> None:
        """Replace the engine's drafter, and free the memory of the old one or of the one that could not be loaded.

        `loaded` then gets None, or a UserError or APIError if the old drafter stays. If it was cancelled, nothing is
        done.
        """
        if not loaded.set_running_or_notify_cancel():
            return
        error: Exception | None = None
        try:
            drafter = make_drafter()
            self.engine.replace_drafter(drafter)
            self._drafter = drafter
            self.head_loads += 1
        except UserError as wrong:
            error = UserError(str(wrong))
        except Exception as failure:  # such as too little memory
            _log.exception("a head can't be loaded; the old one stays")
            error = APIError(f"the head can't be loaded: {first_line(failure)}", "path", status=500)
        if error:
            loaded.set_exception(error)
        else:
            loaded.set_result(None)
        # Two heads are in memory for a moment. The old one may be in a reference cycle, and torch keeps freed blocks.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _restart(self, fault: str) -> None:
        """Create a new engine after a failure. Jobs in flight get an APIError with `fault`; those that wait continue.

        Waiting jobs get the APIError too if no job was in flight. If the engine can't be created, all jobs and heads
        get one, also those that come later.
        """
        waiting = set(self.engine.waiting)
        try:
            self.engine = self._make_engine(self._drafter)
        except Exception:
            _log.exception("the engine can't be created again: restart the server")
            self._broken = True
        with self._wake:
            # Jobs in flight have lost their cache. Those that only wait continue with the new engine, unless there is
            # none, or the old one failed without a job in flight: it would fail again.
            failed, loads = [job for job in self._jobs if not job.waits(waiting)], []
            kept = [job for job in self._jobs if job not in failed] if failed else []
            failed, self._jobs, self._submitted = failed or self._jobs, [], kept + self._submitted
            if self._broken:
                failed, self._submitted = failed + self._submitted, []
                loads, self._loads = self._loads, []
        self._outputs = [(job, output) for job, output in self._outputs if job in kept]
        for job in failed:
            for request in job.requests:
                request.finish_reason = request.finish_reason or "failed"
            self._loop.call_soon_threadsafe(job.put, APIError(fault, status=500))
        for _, loaded in loads:
            if loaded.set_running_or_notify_cancel():
                loaded.set_exception(APIError(_FAILED, status=500))


def _deliver(outputs: list[tuple[Job, StepOutput | APIError]]) -> None:
    """Put outputs into the queues of their jobs, in the event loop's thread."""
    for job, output in outputs:
        job.put(output)
