"""Servers with OpenAI's API, as a client sees them: addresses, keys, and errors in one line without secrets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import openai

from speculator.errors import UserError, first_line, hide, read_secret, refuse

UNAVAILABLE = (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError, asyncio.TimeoutError)
"""Errors of a server that may be back later."""


def base_urls(urls: Sequence[str], option: str) -> list[str]:
    """Return URLs without /v1 at their end; raise a UserError, which names `option`, if one comes twice."""
    bases = [url.strip().rstrip("/").removesuffix("/v1").rstrip("/") for url in urls]
    refuse((len({*bases}) < len(bases), f"{option} names the same URL twice"))
    return bases


def shown(url: str) -> str:
    """Return a URL for messages, without its user and password."""
    return re.sub(r"//[^/]*@", "//", url)


class Connection:
    """A client of one server. The API key is read from $OPENAI_API_KEY.

    Args:
        base: URL without /v1, which may hold a user and password.
        option: flag or setting that holds the URL, for errors.
        kind: `openai.OpenAI` or `openai.AsyncOpenAI`.
        settings: further arguments of `kind`.

    Attributes:
        url: for messages, without a password.
        client: instance of `kind`.

    Raises:
        UserError: not a URL, or the key can't be sent.
    """

    def __init__(self, base: str, option: str, kind: Any, **settings: Any):
        self.url = shown(base)
        try:
            parts = urlsplit(base)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port above 65535, or an address without its closing bracket
            valid = False
        refuse((not valid, f"{option} {self.url}: not a URL such as http://127.0.0.1:8000/v1"))
        key = read_secret("OPENAI_API_KEY")
        self._secrets = [key, *re.findall(r"//[^/]*?:([^/]*)@", base)]
        try:
            self.client = kind(base_url=f"{base}/v1", api_key=key or "none", **settings)
        except Exception as error:  # httpx has its own error types for a wrong URL, proxy or certificate
            raise UserError(f"{option} {self.url}: {first_line(error)}") from None

    def describe(self, error: Exception) -> str:
        """Return one line that names the server and what went wrong, without secrets."""
        if isinstance(error, openai.APIStatusError):
            said, status = first_line(error)[:300], f"Error code: {error.status_code}"  # openai 2 omits it before HTML
            said = said if said.startswith(status) else f"{status} - {said}"
            return hide(f"{self.url}: {said}", *self._secrets)
        if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
            return hide(f"{self.url}: {first_line(error)[:300]}", *self._secrets)  # amid a stream
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return hide(f"no server at {self.url}: {first_line(cause)[:300]}", *self._secrets)
