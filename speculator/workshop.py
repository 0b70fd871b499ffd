"""Where the packages `data`, `eval` and `train` are: next to `speculator` in a checkout, inside it in a wheel."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_INSTALLED = Path(__file__).with_name("_workshop")
ROOT = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[1]
"""Folder of these packages and of the recipes; a wheel keeps them off the top of site-packages."""


def is_wheel() -> bool:
    return ROOT == _INSTALLED


def make_importable() -> None:
    """Put these packages first in the import path, so that a folder of the user's called `data` does not hide ours."""
    if str(ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(ROOT))


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name, which Python imports as empty, doesn't count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
