"""Hidden states from vLLM servers that run the method `extract_hidden_states` with its file connector.

A request is one document as token ids, of which one token is generated. The answer names a safetensors file that the
server writes, on a RAM disk that both see, while it holds a lock file. We wait for the lock, read the file and delete
both, so the disk never holds more than the requests in flight.
"""

from __future__ import annotations

import fcntl
import math
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import openai
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculator.clients.connection import UNAVAILABLE, Connection, base_urls
from speculator.device import dtype_name
from speculator.errors import UserError, first_line, refuse
from speculator.terminal import log

_NAME = "speculator"  # of requests, and thereby of files
_IN_FLIGHT = 32  # requests to each server
_SHARE_OF_DISK = 0.5  # of the free space, for the requests of all processes
_REQUEST_SECONDS = 600.0
_WRITE_SECONDS = 60.0  # between an answer and the end of the lock
_CLOSE_SECONDS = 30.0
_PATIENCE = 1200.0  # seconds without any server; a collective of the other processes waits for 30 minutes
_PAUSES = (0.2, 15.0)  # seconds before a server is tried again: the first pause, and the longest
_BAD_FILES = 4  # for one document
_SMOOTHING = 0.2
_START = "start it with the line that `speculator server-command` prints"


def layers_folder(layers: Sequence[int]) -> str:
    """Return the name, such as "layers-2-14-28", of the folder in which a server writes the states of these layers."""
    return "-".join(["layers", *map(str, layers)])


class _BadFile(Exception):  # noqa: N818
    """A file that is missing, cut short or locked for too long, as a killed server or a full disk leaves it."""


@dataclass(frozen=True)
class Expected:
    """The states that a file must hold.

    Attributes:
        layers: ascending numbers k, for the states after k layers; the last is the target's number of layers.
        hidden_size: D.
    """

    layers: tuple[int, ...]
    hidden_size: int
    dtype: torch.dtype

    def size(self, tokens: int) -> int:
        """Return the size in bytes of the states of a document, given its number of tokens."""
        return tokens * len(self.layers) * self.hidden_size * self.dtype.itemsize


class _HiddenStateServer(Connection):
    """A server, with `busy`, its number of requests in flight, and `seconds`, a running mean of a request's duration.

    A `pause` above 0 (seconds) means that it did not answer the last request, and is tried again at `retry_at`, a time
    by `time.monotonic`.
    """

    def __init__(self, base: str, model: str):
        super().__init__(base, "target.server", openai.OpenAI, max_retries=0, timeout=_REQUEST_SECONDS)
        self.model, self.busy, self.seconds = model, 0, 1.0
        self.pause = self.retry_at = 0.0


class HiddenStateServers:
    """Asks servers for the hidden states of documents, in threads.

    The server that should be done first gets the next request. One that is away is tried again with growing pauses,
    while the others take over its requests.

    Args:
        urls: base URLs, with or without /v1. An API key is read from $OPENAI_API_KEY.
        model: name of the model, unless a server lists exactly one.
        expected: what the files must hold.
        processes: training processes that share the disk.
    """

    def __init__(self, urls: Sequence[str], model: str, expected: Expected, processes: int = 1):
        bases = base_urls(urls, "target.server")
        self.expected, self._processes = expected, processes
        self._servers = [_HiddenStateServer(base, model) for base in bases]
        # Files are named after the request, so that those of a request that failed can be found.
        self._name, self._numbers = f"{_NAME}-{uuid4().hex[:12]}", count()
        self._pool = ThreadPoolExecutor(_IN_FLIGHT * len(bases), thread_name_prefix="hidden-states")
        self._pending: set[Future] = set()
        self._folders: set[Path] = set()
        self._change = threading.Condition()  # guards the fields below, and those of the servers
        self._budget, self._used = math.inf, 0  # bytes on the disk
        self._silent_since: float | None = None  # time since which no server answers
        self._closing = False

    def check(self, document: list[int], longest: int) -> list[tuple[str, Tensor, int, float]]:
        """Send a document to every server, before training.

        Args:
            document: token ids.
            longest: number of tokens of the longest document that will be sent.

        Returns:
            For each server: its URL, the last layer's state [D] of the last token, the next token that the server
            finds likeliest, and the log-probability that it gives that token.

        Raises:
            UserError: a server does not answer, or not as training needs it.
        """
        found = []
        for server in self._servers:
            try:
                models = server.client.models.list().data
                if len(models) == 1:
                    server.model = models[0].id
                # One more than a row: the server generates a token, which has a position too.
                limit = getattr(models[0], "max_model_len", None) if models else None
                short = f"{server.url}: its --max-model-len is {limit}, and rows of {longest} tokens need {longest + 1}"
                refuse((limit is not None and limit < longest + 1, short))
                path, answer = self._ask(server, document, logprobs=1)
                with self._taken(path, document) as states:
                    last = states[-1, -1].clone()
                    self._plan_disk(path.parent, longest)
                _sweep(path.parent)
                token, chance = answer.choices[0].token_ids[0], answer.choices[0].logprobs.token_logprobs[0]
            except openai.APIError as error:
                raise UserError(server.describe(error)) from None
            except _BadFile as error:
                raise UserError(f"{server.url}: {error}") from None
            except (AttributeError, TypeError, IndexError, ValueError):
                raise UserError(f"{server.url}: an answer without token_ids and logprobs, so not vLLM's") from None
            found.append((server.url, last, token, chance))
        return found

    def _plan_disk(self, folder: Path, longest: int) -> None:
        """Limit the bytes in flight to our part of the disk; UserError: a document of `longest` tokens needs more."""
        free, need = shutil.disk_usage(folder).free, self.expected.size(longest)
        budget = int(_SHARE_OF_DISK * free / self._processes)
        gigabytes = f"{need / 1e9:.2f} GB, and {folder} has {free / 1e9:.2f} free for {self._processes} processes"
        refuse((budget < need, f"the states of a row of {longest} tokens need {gigabytes}; docker: --shm-size"))
        self._budget = min(self._budget, budget)

    def submit(self, tokens: list[int], into: Tensor) -> Future:
        """Request the states of a document's T tokens; the future is done when they are in `into` [T, layers, D].

        The future raises a UserError if the request fails.
        """
        future = self._pool.submit(self._fetch, tokens, into)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def close(self) -> None:
        """Wait up to half a minute for the requests in flight, and delete whatever they left on the disk."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(list(self._pending), _CLOSE_SECONDS)
        for server in self._servers:
            server.client.close()
        self._delete(self._name)

    # ---- in the threads

    def _delete(self, request: str) -> None:
        """Delete the files of requests whose names begin with `request`, such as a failed server has left them."""
        for file in (file for folder in tuple(self._folders) for file in folder.glob(f"*{request}-*")):
            file.unlink(missing_ok=True)

    def _fetch(self, tokens: list[int], into: Tensor) -> None:
        """Copy the states of a document into `into` [T, layers, D], from whichever server answers; see `submit`."""
        size, bad_files = self.expected.size(len(tokens)), 0
        with self._change:
            # A document larger than the budget goes when nothing else is in flight; else it would wait for ever.
            self._change.wait_for(lambda: self._closing or not self._used or self._used + size <= self._budget)
            self._used += size
        try:
            while True:
                server = self._next_server()
                began = time.monotonic()
                try:
                    path, _ = self._ask(server, tokens)
                    with self._taken(path, tokens) as states:
                        into.copy_(states)
                except UNAVAILABLE as error:
                    self._leave(server, server.describe(error))
                except openai.APIError as error:
                    raise UserError(server.describe(error)) from None
                except _BadFile as error:
                    bad_files += 1
                    refuse((bad_files == _BAD_FILES, f"{server.url}: {error}; the same command resumes from here"))
                    self._leave(server, f"{server.url}: {error}")
                else:
                    return self._return(server, time.monotonic() - began)
        finally:
            with self._change:
                self._used -= size
                self._change.notify_all()

    def _next_server(self) -> _HiddenStateServer:
        """Return the server that should be done first, counted as busy; wait until one can be asked."""
        with self._change:
            while not self._closing:
                now = time.monotonic()
                ready = [server for server in self._servers if server.retry_at <= now]
                # One request at a time finds out whether a server is back.
                ready = [server for server in ready if not (server.pause and server.busy)]
                if ready:
                    # With 3 requests of 2 s in flight one more is done after 8 s, with 9 of 0.5 s after 5 s.
                    chosen = min(ready, key=lambda server: (server.busy + 1) * server.seconds)
                    chosen.busy += 1
                    return chosen
                self._change.wait(_PAUSES[0])
        raise UserError("closed")

    def _return(self, server: _HiddenStateServer, seconds: float) -> None:
        """Note that a server has answered a request, which took `seconds`."""
        with self._change:
            if server.pause:
                log(f"{server.url} answers again")
            server.busy, server.pause, server.retry_at = server.busy - 1, 0.0, 0.0
            # An average that forgets: of 2 s so far and 7 s now it is 3 s.
            server.seconds += _SMOOTHING * (seconds - server.seconds)
            self._silent_since = None
            self._change.notify_all()

    def _leave(self, server: _HiddenStateServer, fault: str) -> None:
        """Pause a server that failed a request (`fault`: one line); raise a UserError if all failed for 20 minutes."""
        with self._change:
            server.busy -= 1
            if not server.pause:
                log(f"warning: {fault}; it is tried again")
            now = time.monotonic()
            # Pauses of 0.2, 0.4, 0.8, .. up to 15 s. A server has up to 32 requests in flight, which fail together: the
            # first of them doubles the pause.
            if now >= server.retry_at:
                server.pause = min(2 * server.pause or _PAUSES[0], _PAUSES[1])
                server.retry_at = now + server.pause
            if self._silent_since is None and all(each.pause for each in self._servers):
                self._silent_since = now
            silent = 0.0 if self._silent_since is None else now - self._silent_since
            self._change.notify_all()
        gone = f"{fault}; no server has answered for {silent:.0f} s; the same command resumes from the last checkpoint"
        refuse((silent > _PATIENCE, gone))

    def _ask(self, server: _HiddenStateServer, tokens: list[int], **more: Any) -> tuple[Path, Any]:
        """Send a document; return the path of the file that the answer names, and the answer.

        `more` are further fields of the request. Raises a UserError if the file is not on this machine or is to hold
        other layers, and an openai.APIError if the server failed.
        """
        request = f"{self._name}-{next(self._numbers)}"
        try:
            answer: Any = server.client.completions.create(
                model=server.model,
                prompt=tokens,
                max_tokens=1,
                temperature=0,
                extra_body={"request_id": request, "return_token_ids": True},
                **more,
            )
        except openai.APIError:
            # An answer would name the file. Without one the server may have written it all the same.
            self._delete(request)
            raise
        path = _named_file(answer)
        if path is None:
            raise UserError(f"{server.url}: its answers name no file of hidden states in a folder layers-..: {_START}")
        layers, written = layers_folder(self.expected.layers), path.parent.name
        if written != layers:
            discard(answer)
        refuse(
            (not path.parent.is_dir(), f"{server.url}: {path.parent} is not on this machine: mount it at that path"),
            (written != layers, f"{server.url}: it writes {written}, and the head needs {layers}: {_START}"),
            (
                f"{request}-" not in path.name,
                f"{server.url}: {path.name} is not named after its request, so not vLLM's",
            ),
        )
        self._folders.add(path.parent)
        return path, answer

    @contextmanager
    def _taken(self, path: Path, tokens: list[int]) -> Iterator[Tensor]:  # [T, layers, D]
        """Yield the states in a file when its lock is free; delete file and lock at the end, whatever happens.

        Raises a `_BadFile` for a damaged file, and a UserError for other tokens, layers or dtypes than expected.
        """
        try:
            _wait_for_lock(path)
            try:
                with safe_open(str(path), "pt") as file:
                    states, ids = file.get_tensor("hidden_states"), file.get_tensor("token_ids")
            except (OSError, SafetensorError) as error:
                free = shutil.disk_usage(path.parent).free
                full = free < 2 * self.expected.size(len(tokens))
                why = f"{path.parent} is full" if full else f"{path.name} is missing or cut short: {first_line(error)}"
                raise _BadFile(why) from None
            kind = self.expected
            shape = (len(tokens), len(kind.layers), kind.hidden_size)
            refuse(
                (ids.tolist() != tokens, f"{path} holds the states of other tokens: two servers use the same names"),
                (
                    states.shape != shape,
                    f"{path} holds states of shape {list(states.shape)} [tokens, layers, hidden size], and the head "
                    f"needs {list(shape)}: {_START}",
                ),
                (
                    states.dtype != kind.dtype,
                    f"{path} holds {dtype_name(states.dtype)}, and target.dtype is {dtype_name(kind.dtype)}: {_START}",
                ),
            )
            yield states
        finally:
            for file in (path, _lock_of(path)):
                file.unlink(missing_ok=True)


def discard(answer: Any) -> None:
    """Delete the file of hidden states that a completion names; a server writes it even when it is asked for text.

    A file without a lock is kept: no server has written it for us.
    """
    path = _named_file(answer)
    if path is not None and _lock_of(path).is_file():
        with suppress(_BadFile):
            _wait_for_lock(path)
        for file in (path, _lock_of(path)):
            file.unlink(missing_ok=True)


def _named_file(answer: Any) -> Path | None:
    """Return the path of the file of hidden states that a completion names; None if it names none.

    Only a file in a folder of `layers_folder` counts: the named file is deleted, and a server may name any.
    """
    named = (getattr(answer, "kv_transfer_params", None) or {}).get("hidden_states_path")
    path = Path(named) if isinstance(named, str) and named.endswith(".safetensors") else None
    return path if path and re.fullmatch(r"layers(-\d+)+", path.parent.name) else None


def _sweep(folder: Path) -> None:
    """Delete files in a folder that a killed trainer has left: those that are older than any request takes."""
    for file in folder.glob(f"*{_NAME}-*"):
        with suppress(OSError):  # another process has just read it
            if time.time() - file.stat().st_mtime > _REQUEST_SECONDS + _WRITE_SECONDS:
                file.unlink()


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _wait_for_lock(path: Path) -> None:
    """Wait until the server has written a file, which it locks until then; raise a `_BadFile` after a minute."""
    try:
        with _lock_of(path).open() as lock:
            pause, end = 0.001, time.monotonic() + _WRITE_SECONDS
            while True:
                try:
                    return fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise _BadFile(f"{path.name} is locked for more than {_WRITE_SECONDS:.0f} s") from None
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
    except FileNotFoundError:
        raise _BadFile(f"{path.name} has no lock file: leave the connector's use_synchronization_lock on") from None
