"""A vLLM server whose drafter `adapt` replaces: its routes for updates of weights, and its acceptance counters.

The routes exist with VLLM_SERVER_DEV_MODE=1. The weights come through the transfer `speculator_folder` of our plugin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx

from speculator.clients.connection import base_urls, shown
from speculator.clients.counters import read_acceptance
from speculator.errors import UserError, first_line, refuse
from speculator.files import read_json, write_json
from speculator.terminal import log

LAYOUTS = ("eagle3", "dflash", "dflash2")
"""Names of the checkpoint layouts whose weights a running server can replace.

Not `speculators`: it stores the target's embedding, which vLLM shares with the drafter and must not be overwritten.
"""
_FALL = 0.03  # of the acceptance length, as a share, beyond which the old head comes back
_WATCH_SECONDS, _POLL_SECONDS, _LOAD_SECONDS = 1800, 5, 600
_LOOKS = (60, 120, 240)
"""Numbers of looks at busy counters after which a comparison may end before `_WATCH_SECONDS`; few, since each may err.

The first one is the least on which anything is said."""
_GROUPS, _SURE = 20, 2.86  # t of 19 degrees of freedom: each interval has 99%


class MeasuredLength(NamedTuple):
    """A measured acceptance length and its standard error."""

    length: float
    error: float


def acceptance_of(looks: Sequence[tuple[int, int]]) -> MeasuredLength:
    """Return the acceptance length over looks at the counters, at least one in each group.

    Drafts of one request are alike, and requests last for several looks. So the variance is that of groups of looks
    that follow each other. A look is the drafts and accepted tokens since the look before.
    """
    cuts = [len(looks) * i // _GROUPS for i in range(_GROUPS + 1)]
    groups = [tuple(map(sum, zip(*looks[start:end], strict=True))) for start, end in pairwise(cuts)]
    drafts, accepted = map(sum, zip(*groups, strict=True))
    rate = accepted / drafts
    # The error of a ratio of sums: residuals against the common rate.
    residuals = sum((own - rate * count) ** 2 for count, own in groups)
    return MeasuredLength(1 + rate, math.sqrt(residuals * _GROUPS / (_GROUPS - 1)) / drafts)


def ratio(before: MeasuredLength, after: MeasuredLength) -> tuple[float, float]:
    """Return the bounds of the new acceptance length over the old one."""
    value = after.length / before.length
    reach = _SURE * value * math.hypot(before.error / before.length, after.error / after.length)
    return value - reach, value + reach


class VLLMServer:
    """A running vLLM server with our plugin; its `url` may end with /v1, and an empty API `key` means none."""

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
        # So sure that two equal heads can be told apart from a fall.
        sure = lambda found: math.sqrt(2) * _SURE * found.error < _FALL * found.length  # noqa: E731
        before = self._watch_once(sure, measured)
        least = self.counters()[0]
        if fault := self._replace(new):
            # A failed update may leave the drafter half loaded; the texts are right all the same.
            lost = self._replace(old)
            refuse((lost, f"--server {self.name}: the new head was not loaded: {fault}; nor was the old one: {lost}"))
            return f"not loaded: {fault}"

        def decided(found: MeasuredLength) -> bool:
            low, high = ratio(before or found, found)
            return low > 1 - _FALL or high < 1

        after = self.watch(decided, least) if before else None
        if before is None or after is None:
            log(f"--server {self.name}: too little traffic to compare the heads by; the new one stays")
            return None
        low, high = ratio(before, after)
        found = f"acceptance length {before.length:.2f} before the update, {after.length:.2f} after it, "
        found += f"{after.length / before.length - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
        log(f"--server {self.name}: {found}")
        if high >= 1 or low > 1 - _FALL:
            return None
        fault = self._replace(old)
        refuse((fault, f"--server {self.name}: the new head accepts less, and the old one was not loaded: {fault}"))
        return f"swapped back: {found}"

    def _watch_once(self, enough: Callable[[MeasuredLength], bool], measured: Path | None) -> MeasuredLength | None:
        """Return the result of `watch`, which is kept in the file `measured` and read from there if it exists."""
        if measured is not None and measured.exists():
            return MeasuredLength(**read_json(measured))
        found = self.watch(enough)
        if measured is not None and found is not None:
            write_json(measured, found._asdict())
        return found

    def watch(self, enough: Callable[[MeasuredLength], bool], least: int = 0) -> MeasuredLength | None:
        """Look at the counters until the acceptance length is known well enough, but at most for half an hour.

        None: there were too few drafts. `enough` is asked after each of `_LOOKS` looks; `least` drafts came before.
        Raises a UserError if the server does not answer at the end of that time, or was started again.
        """
        last: tuple[int, int] | None = None
        looks: list[tuple[int, int]] = []
        end = time.monotonic() + _WATCH_SECONDS
        while True:
            try:
                now = self.counters()
            except UserError:
                if time.monotonic() >= end:
                    raise
            else:
                last = last or now
                again = "was started again, perhaps with another head; the same command continues the round"
                refuse((now[0] < max(least, last[0]), f"--server {self.name}: it {again}"))
                if now[0] > last[0]:
                    looks.append((now[0] - last[0], now[1] - last[1]))
                    last = now
                    if len(looks) in _LOOKS and enough(found := acceptance_of(looks)):
                        return found
                if time.monotonic() >= end:
                    return acceptance_of(looks) if len(looks) >= _LOOKS[0] else None
            time.sleep(_POLL_SECONDS)

    def counters(self) -> tuple[int, int]:
        """Return the numbers of drafts and of accepted draft tokens since the server's start."""
        answer = self._ask("GET", "/metrics")
        found = read_acceptance(answer.text)
        if found is None:
            raise UserError(f"--server {self.name}: /metrics has no vLLM counters of drafts")
        return found.steps, found.accepted

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
        timeout = httpx.Timeout(10, read=_LOAD_SECONDS)
        try:  # a new connection each time: vLLM closes that of a call that failed
            return httpx.request(method, f"{self.base}{path}", headers=self.headers, timeout=timeout, json=json)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(f"--server {self.name}: no answer: {first_line(error)}") from None
