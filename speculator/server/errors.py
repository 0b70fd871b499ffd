"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from typing import TypedDict

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from speculator.errors import UserError

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class APIError(Exception):
    """A request that is answered with an error.

    Args:
        message: one line for the caller.
        param: name of the wrong field.
        status: HTTP status of the answer.
        code: OpenAI's error code.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, ErrorFields]:
        """Return the JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


async def answer_error(_: Request, error: Exception) -> Response:
    """Exception handler of the application: turn any exception into OpenAI's error body."""
    if isinstance(error, UserError):
        error = APIError(str(error))
    elif isinstance(error, HTTPException):
        error = APIError(str(error.detail), status=error.status_code)
    elif isinstance(error, ClientDisconnect):
        error = APIError("the client disconnected", status=499)
    elif not isinstance(error, APIError):
        error = APIError("internal server error", status=500)
    return JSONResponse(error.body(), error.status, {"Retry-After": "1"} if error.status == 429 else None)


HANDLED = (APIError, UserError, HTTPException, ClientDisconnect, Exception)
