"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from speculator.decoding.request import TooLongError
from speculator.errors import UserError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class APIError(Exception):
    """A request that is answered with an error.

    Args:
        param: name of the wrong field; None: no field is.
        code: OpenAI's error code; None: no code.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


async def answer_error(_: Request, error: Exception) -> Response:
    """Return the response to `error` in OpenAI's form (an exception handler); unknown types get 500 and no message."""
    if isinstance(error, TooLongError):
        # Clients shorten a chat by these words of OpenAI's, or by the code. The other message names a folder.
        limit = f"This model's maximum context length is {error.longest} tokens for a prompt"
        error = APIError(f"{limit}; prompt {error.number} has {error.length}", code="context_length_exceeded")
    elif isinstance(error, UserError):
        error = APIError(str(error))
    elif isinstance(error, HTTPException):
        error = APIError(str(error.detail), status=error.status_code)
    elif isinstance(error, ClientDisconnect):
        error = APIError("the client disconnected", status=499)
    elif not isinstance(error, APIError):
        error = APIError("internal server error", status=500)
    # OpenAI's clients read the second: such a request would fail again.
    headers = {"Retry-After": "1"} if error.status == 429 else {"x-should-retry": "false"} if error.code else None
    return JSONResponse(error.body(), error.status, headers)


HANDLED = (APIError, UserError, HTTPException, ClientDisconnect, Exception)
"""Exceptions that `answer_error` handles, each of which the app has to name."""
