"""The server under many connections and clients that disappear."""

from __future__ import annotations

import asyncio
import json
import resource
import socket

import httpx
import psutil
import pytest
from chat_templates import chat_tokenizer
from serving_here import serving, tiny_target, until

from speculator import generate

BODY = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def target():
    return tiny_target(chat_tokenizer("qwen3"))


@pytest.fixture(scope="module")
def check(target):
    """`check(url)`: the server still gives the right answer."""
    expected = generate(target, None, [[5, 6, 7]], max_new_tokens=20).tokens[0]

    def ask(url: str) -> None:
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
        assert answer.json()["choices"][0]["token_ids"] == expected

    return ask


def connect(url: str, body: dict) -> socket.socket:
    """Send a request and return the connection without reading the answer."""
    connection = socket.create_connection(url.removeprefix("http://").split(":"))
    content = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    return connection


def test_a_thousand_requests_are_answered_or_refused(target, check):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    files = psutil.Process().num_fds()
    with serving(target) as (url, worker):

        async def work() -> list[int]:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

                async def one() -> int:
                    return (await client.post("/v1/completions", json=BODY)).status_code

                return await asyncio.gather(*(one() for _ in range(1000)))

        statuses = asyncio.run(work())
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 260, "the slots and the queue"
        until(lambda: worker.load == 0)
        idle = [socket.create_connection(url.removeprefix("http://").split(":")) for _ in range(1000)]
        check(url)
        for connection in idle:
            connection.close()
        check(url)
    assert psutil.Process().num_fds() <= files + 4


def test_clients_that_disappear_leave_no_requests_and_no_open_files(target, check):
    with serving(target) as (url, worker):
        check(url)
        files = psutil.Process().num_fds()
        for _ in range(40):
            connections = [connect(url, {"prompt": [9], "max_tokens": 250, "stream": True}) for _ in range(6)]
            for number, connection in enumerate(connections):
                if number % 2:
                    connection.recv(100)
                # Closing resets the connection: SO_LINGER with a timeout of 0.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                connection.close()
        check(url)
        until(lambda: worker.load == 0)
        until(lambda: psutil.Process().num_fds() <= files + 2)
