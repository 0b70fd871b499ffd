"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from transformers import PreTrainedTokenizerBase

from speculator.decoding.drafter import Drafter
from speculator.decoding.request import Request as DecodingRequest
from speculator.decoding.request import check_prompts, new_requests
from speculator.prompts import Conversation, continued
from speculator.server.errors import HANDLED, APIError, answer_error
from speculator.server.metrics import CountRequests, Metrics, Traffic
from speculator.server.recorder import Recorder
from speculator.server.responses import ChatWriter, CompletionWriter
from speculator.server.schema import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    LoadRequest,
    parse,
)
from speculator.server.worker import Job, StepOutput, Worker
from speculator.target.model import Target
from speculator.terminal import log

_log = logging.getLogger(__name__)
_LOG_SECONDS = 10.0
_LARGEST_BODY = 16 << 20
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect the events


def create_app(
    target: Target,
    worker: Worker,
    *,
    name: str | None = None,
    api_key: str = "",
    max_queue: int = 256,
    recorder: Recorder | None = None,
    load_drafter: Callable[[str], Drafter] | None = None,
    allowed_origins: Sequence[str] = (),
    hosts: Collection[str] = (),
) -> FastAPI:
    """Create the application; its lifespan starts and stops the worker.

    Args:
        worker: a worker that has not been started.
        name: name of the model in the API (default: the target's).
        api_key: key that requests under /v1 must send; empty: none.
        max_queue: requests that may wait for a slot; further ones are answered with 429.
        recorder: records the answers of clients that do not opt out, and is closed at the end; None: no records.
        load_drafter: creates a drafter from the folder of a head, for /v1/speculator/load; None: no such route.
        allowed_origins: web pages from these origins may read answers; "*": from any.
        hosts: names, one of which the Host header must have; empty: it may have any.
    """
    routes = _Routes(target, worker, name or target.name, max_queue, recorder)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        logging = asyncio.create_task(routes.log_traffic())
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by a second signal
                yield
        finally:
            logging.cancel()
            routes.readers.shutdown(wait=False, cancel_futures=True)
            worker.stop()
            if recorder:
                recorder.close()

    async def check_key(http: Request) -> None:
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        # In constant time: how long a comparison takes must not tell how much of a key is right.
        right = hmac.compare_digest(given.strip().encode(), api_key.encode()) and scheme.lower() == "bearer"
        if api_key and not right:
            raise APIError("the API key is missing or wrong", status=401, code="invalid_api_key")

    async def check_host(http: Request) -> None:
        # A web page can let its own name point to a loopback address, and is then no stranger to the browser.
        given = http.headers.get("host", "")
        # "127.0.0.1:8000" and "[::1]:8000" without the port
        name = re.sub(r":\d*$", "", given).strip("[]").lower()
        if hosts and name not in hosts:
            message = (
                f"the Host {given!r:.60} is not this server's: address it as localhost, or start it with --api_key"
            )
            raise APIError(message, status=403)

    app = FastAPI(title="speculator", lifespan=lifespan, openapi_url=None, dependencies=[Depends(check_host)])
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)])
    v1.add_api_route("/completions", routes.completions, methods=["POST"])
    v1.add_api_route("/chat/completions", routes.chat, methods=["POST"])
    v1.add_api_route("/models", routes.models, methods=["GET"])
    if load_drafter:

        @v1.post("/speculator/load")  # FastAPI 0.120 reads no annotations of a partial
        async def load(http: Request) -> dict[str, str]:
            return await routes.load(load_drafter, http)

    v1.add_api_route("/models/{name:path}", routes.model, methods=["GET"])
    app.include_router(v1)
    app.add_api_route("/health", routes.health, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", routes.metrics_page, methods=["GET"])
    paths = {
        "/health",
        "/metrics",
        *(f"/v1/{path}" for path in ("completions", "chat/completions", "models", "speculator/load")),
    }

    # A client may ask for any path: only known ones become labels, so that the page stays small.
    def count(path: str, status: int) -> None:
        routes.metrics.requests.labels(path if path in paths else "other", status).inc()

    if allowed_origins:
        methods, headers = ["GET", "POST"], ["*"]
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=methods, allow_headers=headers)
    app.add_middleware(CountRequests, count=count)
    for kind in HANDLED:
        app.add_exception_handler(kind, answer_error)
    return app


class _Routes:
    """Handlers of the routes, see `create_app` for the arguments. An APIError that one raises is the answer."""

    def __init__(
        self,
        target: Target,
        worker: Worker,
        name: str,
        max_queue: int,
        recorder: Recorder | None,
    ):
        self.target, self.worker, self.name, self.max_queue = target, worker, name, max_queue
        self.recorder = recorder
        # A target that states no context has one of 2^31 tokens.
        self.max_body = min(max(1 << 20, 16 * target.context_length), _LARGEST_BODY)
        self.num_reserved = 0  # answers to requests that are being read
        # Two threads for prompts alone: more of them would keep the interpreter from the event loop and the engine, and
        # a few long chats must not keep finished answers waiting.
        self.readers = ThreadPoolExecutor(2)
        self.metrics = Metrics(
            worker.traffic,
            {
                "queue": ("Requests that wait for a slot", lambda: worker.queued),
                "slots": ("Requests that can be decoded at a time", lambda: worker.slots),
                "slots_in_use": ("Slots with a request", lambda: worker.in_use),
                "head_loads": ("Heads loaded since the start", lambda: worker.head_loads),
            },
        )
        self._created = int(time.time())

    async def completions(self, http: Request) -> Response:
        request = await self._parsed(CompletionRequest, http)
        return await self._answer(http, request, request.prompt, CompletionWriter)

    async def chat(self, http: Request) -> Response:
        request = await self._parsed(ChatRequest, http)
        if self.target.tokenizer.chat_template is None:
            raise APIError(f"{self.name} has no chat template: use /v1/completions", "messages")
        return await self._answer(http, request, [request.prompt()], ChatWriter)

    async def load(self, load_drafter: Callable[[str], Drafter], http: Request) -> dict[str, str]:
        """Answer `POST /v1/speculator/load` once the head drafts."""
        request = await self._parsed(LoadRequest, http)
        await self.worker.replace_drafter(partial(load_drafter, request.path))
        self.worker.head = request.path
        return {"path": request.path}

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        if not name:  # /v1/models/
            return await self.models()
        self._check_model(name)
        return JSONResponse(self._model())

    async def log_traffic(self) -> None:
        """Every ten seconds log the traffic, if there is any, and write recorded rows that are due; never returns."""
        before = Traffic()
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            now = self.worker.traffic.since(Traffic())
            traffic, before = now.since(before), now
            if self.recorder:
                self.recorder.write_due()
            if line := traffic.line(_LOG_SECONDS, self.worker.in_use, self.worker.queued):
                with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more, or it is closed
                    log(line)

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"}) if self.worker.alive else JSONResponse({"status": "down"}, 503)

    async def metrics_page(self) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, str | int | None]:
        """Return the object of the model in OpenAI's format."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "speculator",
            "max_model_len": self.target.context_length,
            "speculator": self.worker.head,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"the model {name!r:.100} does not exist; this server has {self.name!r}"
            raise APIError(message, "model", status=404, code="model_not_found")

    async def _parsed(self, kind: type[AnyRequest], http: Request) -> AnyRequest:
        """Read the body and return it as a checked request of this kind; raise an APIError for a mistake."""
        body = await self._body(http)
        with self._reserved(1):  # only now: a client that sends slowly must not hold a place
            # In a thread: a body of megabytes must not hold up the other streams.
            return await asyncio.to_thread(parse, kind, body)

    async def _body(self, http: Request) -> bytes:
        """Read the body; raise an APIError if it's too long or no JSON: web pages may send other types (CORS)."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise APIError("Content-Type must be application/json", status=415)
        body = bytearray()
        async for piece in http.stream():
            body += piece
            if len(body) > self.max_body:
                raise APIError(f"the body is larger than {self.max_body:,} bytes", status=413)
        return bytes(body)

    async def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        prompts: Sequence[Conversation | str | list[int]],
        writer_class: type[CompletionWriter],
    ) -> Response:
        """Tokenize the prompts, decode `request.choices` answers to each; return the response, whole or as events."""
        began = time.monotonic()
        self._check_model(request.model)
        count, most = len(prompts) * request.choices, self.worker.slots + self.max_queue
        if count > most:
            # More than slots and queue hold together would never fit: a mistake of the client's, not a full server.
            message = f"{len(prompts)} prompts with n = {request.choices}: at most {most} answers at a time"
            raise APIError(message, "n")
        with self._reserved(count):  # before anything is made of each: there may be millions
            making = partial(self._requests, request, prompts, writer_class)
            decoding_requests, writer = await asyncio.get_running_loop().run_in_executor(self.readers, making)
            job = self.worker.submit(decoding_requests)
        self.metrics.prompt_tokens.inc(sum(map(len, writer.prompts)))
        opted_out = request.store is False or http.headers.get("x-store", "").lower() == "false"
        forced = request.ignore_eos or request.min_tokens  # the target would have ended its answer earlier
        recorded = self.recorder is not None and not opted_out and not forced and self.recorder.chooses()
        # A stream ends long after this function has returned, so it closes the job itself.
        close = partial(self._close, job, writer, began, recorded)
        if request.stream:
            return _Events(self._events(job, writer, began), close)
        try:
            return await self._whole(http, job, writer, began)
        finally:
            close()

    def _requests(
        self,
        request: GenerationRequest,
        prompts: Sequence[Conversation | str | list[int]],
        writer_class: type[CompletionWriter],
    ) -> tuple[list[DecodingRequest], CompletionWriter]:
        """Tokenize the prompts; return one decoding request per answer, and the writer of the response."""
        tokenizer = self.target.tokenizer
        ids = [prompt if isinstance(prompt, list) else _tokens(prompt, tokenizer) for prompt in prompts]
        # Answers to one prompt share its tokens.
        texts = [text for text in check_prompts(self.target, ids) for _ in range(request.choices)]
        made = new_requests(
            self.target,
            texts,
            request.samplings(len(texts)),
            max_new_tokens=request.max_new_tokens or self.target.context_length,
            min_tokens=request.min_tokens or 0,
            stop_strings=request.stops,
            eos_token_ids=() if request.ignore_eos else None,
            logprobs=request.num_logprobs,
        )
        return made, writer_class(request, self.name, tokenizer, ids, self.target.continues)

    @contextlib.contextmanager
    def _reserved(self, count: int) -> Iterator[None]:
        """Keep room for so many answers while their request is read; raise an APIError unless there is room."""
        if self.worker.load + self.num_reserved + count > self.worker.slots + self.max_queue:
            raise APIError("too many requests are waiting: try again later", status=429, code="queue_full")
        self.num_reserved += count
        try:
            yield
        finally:
            self.num_reserved -= count

    async def _whole(self, http: Request, job: Job, writer: CompletionWriter, began: float) -> Response:
        """Return the whole response, with status 499 if the client disconnected; for the arguments see `_outputs`."""

        async def collect() -> None:
            async for output in self._outputs(job, writer, began):
                writer.add(output)

        # The body has been read, so the only message left to receive is that the client disconnected.
        disconnected, collected = asyncio.ensure_future(http.receive()), asyncio.ensure_future(collect())
        try:
            await asyncio.wait({disconnected, collected}, return_when=asyncio.FIRST_COMPLETED)
            if not collected.done():
                return Response(status_code=499)
            collected.result()
        finally:
            disconnected.cancel()
            collected.cancel()
        # In a thread: log-probabilities have a text for each alternative, and their JSON has megabytes.
        return await asyncio.to_thread(lambda: JSONResponse(writer.body()))

    async def _events(self, job: Job, writer: CompletionWriter, began: float) -> AsyncIterator[str]:
        """Yield the events of a stream; an error is its last event. For the arguments see `_outputs`."""
        # Sent with the first token: benchmarks take the first event for it.
        events = writer.opening()
        try:
            async for output in self._outputs(job, writer, began):
                # The last event in a thread: it may parse the whole answer for tool calls.
                last = output.finish_reason is not None
                events.append(await asyncio.to_thread(writer.event, output) if last else writer.event(output))
                for event in filter(None, events):
                    yield event
                events = []
            for event in writer.closing():
                yield event
        except Exception as error:  # the status has been sent: an event is all that can tell the client
            if not isinstance(error, APIError):
                _log.exception("a stream failed")
                error = APIError("internal server error", status=500)
            yield f"data: {json.dumps(error.body())}\n\n"

    async def _outputs(self, job: Job, writer: CompletionWriter, began: float) -> AsyncIterator[StepOutput]:
        """Yield the outputs of a job, as they come, until every answer has ended; the caller adds each to `writer`.

        The time to the first token starts at `began`, by `time.monotonic`.
        """
        first = True
        while not writer.done:
            output = await job.next_output()
            if first:
                self.metrics.first_token.observe(time.monotonic() - began)
            first = False
            yield output

    def _close(self, job: Job, writer: CompletionWriter, began: float, recorded: bool) -> None:
        """Cancel unfinished answers and count all; with `recorded`, also record the answers if all are whole."""
        job.cancel()
        self.metrics.request_seconds.observe(time.monotonic() - began)
        for request in job.requests:
            self.metrics.answers.labels(request.finish_reason).inc()
        if recorded and self.recorder and writer.done:
            self.recorder.add(job.requests)


def _tokens(prompt: Conversation | str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    prompt = continued(prompt, where="prompt") if isinstance(prompt, str) else prompt
    return prompt.tokens(tokenizer)


class _Events(StreamingResponse):
    """Server-sent events; calls `close` after the last event or when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers=_EVENT_HEADERS)
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
