"""The routes, and a bound on the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from speculator.decoding.request import Request as Decoded
from speculator.decoding.request import check_prompts
from speculator.errors import UserError
from speculator.prompts import Prompt, continued
from speculator.server.encoding import Encoder
from speculator.server.guard import LATE, Guard, Limits, answer_error, refusal_of
from speculator.server.metrics import Metrics
from speculator.server.schema import BadRequestError, ChatFields, CompletionFields, Fields, parse
from speculator.server.worker import EngineError, Job, Worker
from speculator.server.writing import ChatWriter, Writer
from speculator.target.model import Target

_DEFAULT_TOKENS = 16  # of a completion without max_tokens, as OpenAI's; a chat goes on to its end


def create_app(
    target: Target, worker: Worker, *, name: str | None = None, api_key: str = "", limits: Limits | None = None
) -> FastAPI:
    """The application, whose lifespan runs the worker.

    Args:
        target: the worker's.
        worker: decodes; not started yet.
        name: of the model; default: the target's.
        api_key: asked for under /v1; empty: none.
        limits: of requests.
    """
    limits = limits or Limits()
    limits = replace(limits, body=limits.body or max(1 << 20, 16 * target.context_length))
    service = _Service(target, worker, name or target.name, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        service.encoder.start()
        try:
            yield
        finally:
            worker.stop()
            service.encoder.close()

    app = FastAPI(title="speculator", lifespan=lifespan, openapi_url=None)
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/metrics", service.page, methods=["GET"])
    paths = {getattr(route, "path", "") for route in app.routes}

    def answered(path: str, status: int) -> None:
        service.metrics.requests.labels(path if path in paths else "other", status).inc()

    app.add_middleware(Guard, limits=limits, api_key=api_key, answered=answered)
    for kind in (BadRequestError, UserError, EngineError, HTTPException, ClientDisconnect, Exception, *LATE):
        app.add_exception_handler(kind, answer_error)
    return app


class _Service:
    """What the routes do."""

    def __init__(self, target: Target, worker: Worker, name: str, limits: Limits):
        self.target, self.worker, self.name, self.limits = target, worker, name, limits
        self.encoder = Encoder(target.tokenizer)
        self.metrics = Metrics(
            {
                "queue": ("Requests that wait for a slot", lambda: worker.queued),
                "slots": ("Requests that are decoded at a time", lambda: worker.slots),
                "slots_in_use": ("Slots with a request", lambda: worker.in_use),
            }
        )
        self._encoding = 0
        self._created = int(time.time())

    async def completions(self, http: Request) -> Response:
        fields = parse(CompletionFields, await http.body())
        prompts = [continued(each, where="prompt") if isinstance(each, str) else each for each in fields.prompts]
        return await self._answer(http, fields, prompts, fields.max_tokens or _DEFAULT_TOKENS, Writer)

    async def chat(self, http: Request) -> Response:
        fields = parse(ChatFields, await http.body())
        prompt = fields.asked()
        if not self.encoder.chats:
            raise BadRequestError(f"{self.name} has no chat template: use /v1/completions", "messages")
        return await self._answer(http, fields, [prompt], fields.limit or self.target.context_length, ChatWriter)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model()

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"}) if self.worker.alive else JSONResponse({"status": "down"}, 503)

    async def page(self) -> Response:
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, Any]:
        facts = {"owned_by": "speculator", "max_model_len": self.target.context_length}
        return {"id": self.name, "object": "model", "created": self._created, **facts}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise BadRequestError(
                f"no model {name!r:.100} here, only {self.name!r}", "model", status=404, code="model_not_found"
            )

    async def _answer(
        self,
        http: Request,
        fields: Fields,
        prompts: Sequence[Prompt | list[int]],
        limit: int,
        kind: type[Writer],
    ) -> Response:
        """Encode the prompts, decode their answers, write them."""
        began = time.monotonic()
        deadline = began + self.limits.seconds
        self._check_model(fields.model)
        count = len(prompts) * fields.choices
        with self._room(count):
            ids = await asyncio.wait_for(self._encoded(prompts), self.limits.seconds)
            requests = self._requests(fields, ids, limit)
            job = self.worker.submit(requests, fields.seed is not None, deadline)
        self.metrics.prompt_tokens.inc(sum(map(len, ids)))
        writer = kind(fields, self.name, self.target.tokenizer, ids)
        close = partial(self._close, job, began)
        if fields.stream:
            return _Events(self._events(job, writer, began), close)
        try:
            return await self._whole(http, job, writer, began)
        finally:
            close()

    async def _encoded(self, prompts: Sequence[Prompt | list[int]]) -> list[list[int]]:
        return [await self.encoder.tokens(each) if isinstance(each, Prompt) else each for each in prompts]

    @contextlib.contextmanager
    def _room(self, count: int) -> Any:
        """Count requests that are being encoded, if there is room for them.

        Raises:
            BadRequestError: there is none now, or never.
        """
        most = self.worker.slots + self.limits.queue
        if count > most:
            raise BadRequestError(f"n times the prompts are {count} answers: at most {most} at a time", "n")
        if not count:
            raise BadRequestError("prompt: there is none", "prompt")
        if self.worker.load + self._encoding + count > most:
            raise BadRequestError("too many requests wait already: try again later", status=429, code="queue_full")
        self._encoding += count
        try:
            yield
        finally:
            self._encoding -= count

    def _requests(self, fields: Fields, ids: list[list[int]], limit: int) -> list[Decoded]:
        check_prompts(self.worker.engine.target, ids)
        samplings = fields.samplings(len(ids) * fields.choices)
        make, choices = self.worker.engine.request, fields.choices
        how = {"max_new_tokens": limit, "stop_strings": fields.stops, "logprobs": fields.alternatives}
        return [make(ids[number // choices], own, **how) for number, own in enumerate(samplings)]  # type: ignore[arg-type]

    async def _whole(self, http: Request, job: Job, writer: Writer, began: float) -> Response:
        async def collect() -> None:
            async for news in self._news(job, writer, began):
                writer.take(news)

        # Behind the body nothing comes but that the client has gone.
        gone, work = asyncio.ensure_future(http.receive()), asyncio.ensure_future(collect())
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            work.result()
        finally:
            gone.cancel()
            work.cancel()
        return JSONResponse(writer.body())

    async def _events(self, job: Job, writer: Writer, began: float) -> AsyncIterator[str]:
        for event in writer.opening():
            yield event
        try:
            async for news in self._news(job, writer, began):
                if event := writer.event(news):
                    yield event
        except (EngineError, *LATE) as error:
            yield f"data: {json.dumps(refusal_of(error).body())}\n\n"
            return
        for event in writer.closing():
            yield event

    async def _news(self, job: Job, writer: Writer, began: float) -> AsyncIterator[Any]:
        first = True
        while not writer.done:
            news = await job.next()
            if first:
                self.metrics.first_token.observe(time.monotonic() - began)
            first = False
            if writer.answers[news.index].stopped:  # its request had not heard of that
                continue
            yield news
            if writer.answers[news.index].stopped:
                job.requests[news.index].cancel()

    def _close(self, job: Job, began: float) -> None:
        """What has not ended is not wanted any more."""
        job.cancel()
        self.metrics.whole.observe(time.monotonic() - began)
        for request in job.requests:
            self.metrics.ended(request)


class _Events(StreamingResponse):
    """Server-sent events; `close` is called when the last has been taken, or the client has gone."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except LATE:  # the reader; what has begun can't become a refusal: the connection is closed
            pass
        finally:
            self._close()
