"""A server of a tiny target in float64 whose head drafts chains of three tokens."""

from __future__ import annotations

import httpx
import pytest
from serving_here import chat_target, drafter, serving

__all__ = ["chat_target", "drafter"]


@pytest.fixture(scope="module")
def server(chat_target, drafter):
    """URL of the server."""
    with serving(chat_target, drafter, max_queue=8) as (url, _):
        yield url


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client
