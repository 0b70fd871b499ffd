"""A server of a tiny target in float64 whose head drafts chains of three tokens."""

from __future__ import annotations

import httpx
import pytest
from chat_templates import chat_tokenizer
from serving_here import serving, tiny_head_for, tiny_target

from speculator import HeadDrafter, Target


@pytest.fixture(scope="module")
def chat_target() -> Target:
    return tiny_target(chat_tokenizer("qwen3"))


@pytest.fixture(scope="module")
def drafter(chat_target) -> HeadDrafter:
    return HeadDrafter(tiny_head_for(chat_target))


@pytest.fixture(scope="module")
def server(chat_target, drafter):
    """URL of the server."""
    with serving(chat_target, drafter, max_queue=8) as (url, _):
        yield url


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client
