"""What keeps one client from another: bounds on bodies and time, and the key."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from speculator.errors import UserError
from speculator.server.schema import BadRequestError
from speculator.server.worker import EngineError

LATE = (asyncio.TimeoutError, TimeoutError)  # one since Python 3.11


@dataclass
class Limits:
    """What one client may ask of the server.

    Attributes:
        queue: requests that wait for a slot; one more is answered by 429.
        body: bytes of a request; None: 1 MiB, or 16 for each token of the context.
        seconds: from a request to the end of its answer.
        receive_seconds: in which a body has to come.
        send_seconds: in which a reader has to take a piece.
    """

    queue: int = 256
    body: int | None = None
    seconds: float = 600.0
    receive_seconds: float = 30.0
    send_seconds: float = 60.0


class Guard:
    """Middleware: refuses callers without the key and too large bodies, cuts off who sends or reads too slowly.

    Args:
        app: behind it.
        limits: with a `body`.
        api_key: asked for under /v1; empty: none.
        answered: called with the path and the status of each answer.
    """

    def __init__(self, app: Any, limits: Limits, api_key: str, answered: Callable[[str, int], None]):
        self._app, self._limits, self._answered = app, limits, answered
        self._key = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def bounded_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._answered(scope["path"], message["status"])
            with anyio.fail_after(self._limits.send_seconds):
                await send(message)

        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        if refusal is not None:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, bounded_send)
        else:
            await self._app(scope, self._bounded(receive), bounded_send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> BadRequestError | None:
        """What is wrong before the body has been read."""
        known = not self._key or hmac.compare_digest(headers.get(b"authorization", b""), self._key)
        if not known and path.startswith("/v1/"):
            return BadRequestError("no API key, or another one", status=401, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length[:20]) > self._most else None

    def _bounded(self, receive: Any) -> Any:
        """`receive`, until the body is too large or too late."""
        until, size, whole = anyio.current_time() + self._limits.receive_seconds, 0, False

        async def bounded_receive() -> Any:
            nonlocal size, whole
            if whole:
                return await receive()
            with anyio.fail_after(max(0.0, until - anyio.current_time())):
                message = await receive()
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._most:
                raise self._too_large()
            return message

        return bounded_receive

    @property
    def _most(self) -> int:
        assert self._limits.body is not None
        return self._limits.body

    def _too_large(self) -> BadRequestError:
        return BadRequestError(f"the body is larger than {self._most:,} bytes", status=413)


def cut_slow_readers(listening: socket.socket, limits: Limits) -> None:
    """Let the kernel end connections of this socket whose peer reads nothing (Linux). A closed connection stays until
    what was written to it has been read.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * limits.send_seconds))


def refusal_of(error: Exception) -> BadRequestError:
    """The error that the caller gets."""
    if isinstance(error, BadRequestError):
        return error
    if isinstance(error, UserError):
        return BadRequestError(str(error))
    if isinstance(error, HTTPException):
        return BadRequestError(str(error.detail), status=error.status_code)
    if isinstance(error, ClientDisconnect):
        return BadRequestError("the client has gone", status=499)
    if isinstance(error, LATE):
        return BadRequestError("it took too long", status=504, code="timeout")
    return BadRequestError("the engine failed" if isinstance(error, EngineError) else "the server failed", status=500)


async def answer_error(_: Request, error: Exception) -> Response:
    """The answer to a request that raised."""
    bad = refusal_of(error)
    return JSONResponse(bad.body(), bad.status, {"Retry-After": "1"} if bad.status == 429 else None)
