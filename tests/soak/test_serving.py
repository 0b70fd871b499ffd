"""The server under those who read slowly, come by the thousand, die midway, or bring a template to its end."""

from __future__ import annotations

import asyncio
import resource
import socket

import httpx
import psutil
import pytest
from chat_templates import CHATML, chat_tokenizer
from serving_here import serving, tiny_target, until

from speculator import generate
from speculator.server.guard import Limits

RUNAWAY = (
    CHATML
    + "{% if messages[0].content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    + "{% endfor %}{% endfor %}{% endif %}"
)
BODY = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def target():
    return tiny_target(chat_tokenizer("qwen3", RUNAWAY))


def good(url: str, target, expected=[]) -> None:  # noqa: B006 - made once
    expected = expected or generate(target, None, [[5, 6, 7]], max_new_tokens=20).tokens
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)
    assert answer.json()["choices"][0]["token_ids"] == expected[0]


def raw(url: str, body: str, **options) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    for name, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body.encode())
    return connection


def test_readers_that_do_not_read_are_cut_and_harm_nobody(target):
    body = '{"prompt": [9], "n": 8, "max_tokens": 250, "stream": true, "logprobs": 20, "return_token_ids": true}'
    with serving(target, limits=Limits(send_seconds=3)) as (url, worker):
        files = psutil.Process().num_fds()
        slow = [raw(url, body, SO_RCVBUF=4096) for _ in range(8)]
        good(url, target)
        until(lambda: worker.load == 0, 120)
        good(url, target)
        until(lambda: psutil.Process().num_fds() <= files + len(slow), 60)  # the readers' own ends are left
        for connection in slow:
            connection.close()
        good(url, target)


def test_a_thousand_connections_are_each_answered_or_refused(target):
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
        good(url, target)
        for connection in idle:
            connection.close()
        good(url, target)
    assert psutil.Process().num_fds() <= files + 4


def test_clients_that_die_midway_leave_nothing(target):
    body = '{"prompt": [9], "max_tokens": 250, "stream": true}'
    with serving(target) as (url, worker):
        good(url, target)
        files = psutil.Process().num_fds()
        for _ in range(40):
            dying = [raw(url, body) for _ in range(6)]
            for number, connection in enumerate(dying):
                if number % 2:
                    connection.recv(100)
                # No farewell: the connection is reset.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                connection.close()
        good(url, target)
        until(lambda: worker.load == 0)
        until(lambda: psutil.Process().num_fds() <= files + 2)


def test_a_template_without_an_end_and_a_process_that_dies(target):
    def ask(content: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)

    with serving(target) as (url, _):
        assert ask("hello").status_code == 200
        answer = ask("loop")
        assert (answer.status_code, "does not end" in answer.text) == (400, True)
        assert ask("hello").status_code == 200
        for child in psutil.Process().children(recursive=True):
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()
        assert ask("hello").status_code == 200
