"""A server behind a URL: requests that are tried again, answers within bounds of time and size, secrets not shown."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx

from speculator.errors import UserError, check_secret, first_line, hide, refuse
from speculator.files import parse_json

MOST_BYTES = 1 << 20
"""Of an answer, unless more is allowed."""
_TRIES = 8
_FIRST_DELAY = 0.5  # seconds; doubled from try to try, so a server may be gone for a minute
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 600.0  # from a request to the last byte of its answer
_FAULT_BYTES = 4096  # of an error's text, of which a line is shown
_NOT_SO = (400, 404, 405, 415, 422, 501)  # what servers say of a path, a prompt or a field that they don't know


class RefusedError(UserError):
    """The server knows no such path, or won't take what was sent."""


class GoneError(UserError):
    """No such server, or it has stopped to answer."""


class Connection:
    """A server of OpenAI's interface. A key is taken from $OPENAI_API_KEY.

    Attributes:
        url: without /v1 and without a password, to be shown.
        client: to be entered while there are requests.
        reached: it has answered something.

    Raises:
        UserError: no URL, or a key that no header can hold.
    """

    def __init__(self, url: str):
        self._base, self.url = _checked(url)  # with the password of the URL, and without
        key = _key()
        self._secrets = key, httpx.URL(self._base).password
        # Answers come as they are: what is compressed may be a thousand times as large as it looks.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        try:
            self.client = httpx.AsyncClient(
                headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
            )
        except (ValueError, OSError, httpx.InvalidURL) as error:
            raise UserError(
                f"the environment's proxy or certificates can't be used: {self.said(first_line(error))}"
            ) from None
        self.reached = self._answered = False

    async def json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        tries: int = _TRIES,
        seconds: float | None = None,
        most: int = MOST_BYTES,
    ) -> Any:
        """The JSON that the server answers; tried again while the fault may pass.

        Raises:
            GoneError: no fault passed within a minute.
            RefusedError: it does not take this.
            UserError: it answers what no server of this kind does.
        """
        where, seconds = f"{self.url}/v1/{path}", _ANSWER_SECONDS if seconds is None else seconds
        fault, late = "", 0
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(_FIRST_DELAY * 2 ** (attempt - 1))
            try:
                response, content = await asyncio.wait_for(self._exchange(method, path, body, most), seconds)
            except asyncio.TimeoutError:
                fault, late = f"no whole answer within {seconds:g} seconds", late + 1
                if late > self._answered:  # of a server that works one answer may be lost; a stuck one stays so
                    break
                continue
            except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
                raise UserError(f"--server {self.url}: {self.said(first_line(error))}") from None
            except (httpx.TransportError, OSError) as error:
                fault = first_line(error)
                if not self.reached:
                    break
                continue
            text = content.decode("utf-8", "replace")
            if response.is_success:
                try:
                    answer = parse_json(text, "an answer")
                except UserError as error:
                    fault = str(error)
                    continue
                self._answered |= body is not None
                return answer
            fault = f"{response.status_code} {text[:200]}"
            if response.has_redirect_location:
                fault = f"{response.status_code}, a redirect to {response.headers['location'][:200]}: name that"
            if response.status_code in _NOT_SO:
                raise RefusedError(self.said(fault))
            if response.status_code != 429 and response.status_code < 500:
                raise UserError(self.said(f"{where}: {fault}"))
        raise GoneError(self.said(f"{where}: {fault}" if self.reached else f"no server at {self.url}: {fault}"))

    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, most: int
    ) -> tuple[httpx.Response, bytes]:
        """One request; gives the response and its body, of an error's the beginning."""
        content = None if body is None else json.dumps(body).encode()
        async with self.client.stream(method, f"{self._base}/v1/{path}", content=content) as response:
            self.reached = True
            if response.headers.get("content-encoding", "identity") != "identity":
                raise UserError(f"{self.url}: compresses its answers, though it was asked not to")
            read = bytearray()
            async for part in response.aiter_raw():
                read += part
                if not response.is_success and len(read) >= _FAULT_BYTES:
                    break
                refuse((len(read) > most, f"{self.url}: an answer of more than {most:,} bytes"))
            return response, bytes(read)

    def said(self, text: str) -> str:
        """What the server or a library says, without the key and the password."""
        return hide(text, *self._secrets)


def _checked(url: str) -> tuple[str, str]:
    """A server's URL without /v1, and the same without a password, to be shown.

    Raises:
        UserError: it is none.
    """
    try:
        parsed = httpx.URL(url.strip())
        port = parsed.port or 80
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError(f"--server is no URL: {first_line(error)}") from None
    bare = parsed.copy_with(username=None, password=None) if parsed.userinfo else parsed
    refuse(
        (not url.strip(), "--server is empty: give the server's URL, as http://127.0.0.1:8000"),
        (parsed.scheme not in ("http", "https") or not parsed.host, f"--server {bare}: not as http://127.0.0.1:8000"),
        (not 0 < port < 1 << 16, f"--server {bare}: no port {port}"),
        (parsed.query or parsed.fragment, f"--server {bare.copy_with(query=None, fragment=None)}: no ? or # behind it"),
    )
    base, shown = (str(each).rstrip("/").removesuffix("/v1").rstrip("/") for each in (parsed, bare))
    return base, shown


def _key() -> str:
    """The key that the environment has; empty without one.

    Raises:
        UserError: no header can hold it. It is not shown.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    check_secret("$OPENAI_API_KEY", key)
    return key
