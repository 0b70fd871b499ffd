"""The points at which tests end a run, as SIGKILL would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Ends the process, as far as the code under test can tell: nothing handles it."""


@contextmanager
def killed_at(owner: Any, name: str, call: int = 0) -> Iterator[None]:
    """Kill the run in this block when it calls `owner.name` for the `call`-th time, counted from 0."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            raise Killed
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counted)
        with pytest.raises(Killed):
            yield
