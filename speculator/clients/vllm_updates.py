"""A vLLM server whose drafter `adapt` replaces: its routes for updates of weights, and its acceptance counters.

The routes exist with VLLM_SERVER_DEV_MODE=1. The weights come through the transfer `speculator_folder` of our plugin.
"""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from speculator.clients.connection import base_urls, shown
from speculator.clients.vllm_counters import read_counters
from speculator.errors import UserError, first_line, refuse
from speculator.files import read_json, write_json
from speculator.terminal import log

LAYOUTS = ("eagle3", "dflash", "dflash2")
"""Names of the checkpoint layouts whose weights a running server can replace.

Not `speculators`: it stores the target's embedding, which vLLM shares with the drafter and must not be overwritten.
"""
_DRAFTS = 2000  # that are compared of each head: the standard error of the acceptance length is then about 0.03
_FALL = 0.03  # of the acceptance length, as a share, beyond which the old head comes back
_WATCH_SECONDS, _POLL_SECONDS, _LOAD_SECONDS = 1800, 5, 600


class VLLMServer:
    """A running vLLM server with our plugin.

    Args:
        url: with or without /v1.
        key: API key; empty: none.
    """

    def __init__(self, url: str, key: str):
        (self.base,), self.name = base_urls([url], "--server"), shown(url)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def try_head(self, new: str, old: str, measured: Path | None = None) -> str | None:
        """Replace the draft head, and undo that if it accepts less; may take an hour.

        Args:
            new: folder of the exported new head, on the server's machine.
            old: the same of the head in use.
            measured: file that keeps the old head's acceptance length, for the call after a kill (default: none).

        Returns:
            None if the new head is in use at the end, otherwise the reason that the old one is.

        Raises:
            UserError: the server does not answer (for half an hour, while it is watched), or the old head can't be
                loaded again.
        """
        before = self._watch_once(measured)
        least = self.counters()[0]
        if fault := self._replace(new):
            # A failed update may leave the drafter half loaded; the texts are right all the same.
            lost = self._replace(old)
            refuse((lost, f"--server {self.name}: the new head was not loaded: {fault}; nor was the old one: {lost}"))
            return f"not loaded: {fault}"
        after = self.watch(least)
        if before is None or after is None:
            log(f"--server {self.name}: fewer than {_DRAFTS} drafts to compare the heads by; the new one stays")
            return None
        log(f"--server {self.name}: acceptance length {before:.2f} before the update, {after:.2f} after it")
        if after >= (1 - _FALL) * before:
            return None
        fault = self._replace(old)
        refuse((fault, f"--server {self.name}: the new head accepts less, and the old one was not loaded: {fault}"))
        return f"swapped back: acceptance length {after:.2f} in the server, {before:.2f} before"

    def _watch_once(self, measured: Path | None) -> float | None:
        """Return the result of `watch`, which is kept in the file `measured` and read from there if it exists."""
        if measured is not None and measured.exists():
            return read_json(measured)["acceptance_length"]
        found = self.watch()
        if measured is not None and found is not None:
            write_json(measured, {"acceptance_length": found})
        return found

    def watch(self, least: int = 0) -> float | None:
        """Wait for the next 2,000 drafts and return their acceptance length; None if fewer come in half an hour.

        There have been `least` drafts before. Raises a UserError if the server does not answer at the end of that
        time, or was started again.
        """
        begun: tuple[int, int] | None = None
        end = time.monotonic() + _WATCH_SECONDS
        while True:
            try:
                now = self.counters()
            except UserError:
                if time.monotonic() >= end:
                    raise
            else:
                begun = begun or now
                again = "was started again, perhaps with another head; the same command continues the round"
                refuse((now[0] < max(least, begun[0]), f"--server {self.name}: it {again}"))
                if now[0] - begun[0] >= _DRAFTS:
                    return 1 + (now[1] - begun[1]) / (now[0] - begun[0])
                if time.monotonic() >= end:
                    return None
            time.sleep(_POLL_SECONDS)

    def counters(self) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted draft tokens since the server's start."""
        answer = self._ask("GET", "/metrics")
        found = read_counters(answer.text)
        known = answer.is_success and "vllm:spec_decode_num_drafts" in answer.text
        refuse((not known, f"--server {self.name}: /metrics has no vLLM counters of drafts"))
        return found["drafts"], found["accepted_tokens"]

    def resume(self) -> None:
        """Let the server decode again, in case a killed run has paused it."""
        self._ask("POST", "/resume")

    def _replace(self, folder: str) -> str | None:
        """Load the weights in `folder` into the drafter between two steps; return the reason if that failed."""
        steps: list[tuple[str, dict | None]] = [
            ("/pause?mode=keep", None),  # requests in flight go on after it
            ("/start_draft_weight_update", None),
            ("/update_weights", {"update_info": {"folder": folder}}),
            ("/finish_weight_update", None),
        ]
        try:
            for path, body in steps:
                answer = self._ask("POST", path, json=body)
                if not answer.is_success:
                    return f"{path}: status {answer.status_code}: {answer.text[:300]}"
            return None
        finally:
            self.resume()

    def _ask(self, method: str, path: str, json: dict | None = None) -> httpx.Response:
        """Return the server's answer, whatever its status; raise a UserError if there is none."""
        timeout = httpx.Timeout(10, read=_LOAD_SECONDS)
        try:  # a new connection each time: vLLM closes that of a call that failed
            return httpx.request(method, f"{self.base}{path}", headers=self.headers, timeout=timeout, json=json)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"--server {self.name}: no answer: {first_line(error)}") from None
