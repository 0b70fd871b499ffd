"""Streams go on while other clients send the server large bodies that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http.client
import json
import re
import time

import forked
import httpx
import pytest
import torch
from conftest import CONFIGS, tiny_tokenizer
from odd_rows import CALLS
from transformers import AutoModelForCausalLM

_SIZE = 15 << 20  # a little below the largest body
_LONG_TEXT = 2 << 20  # more tokens than the context has
# Parsing so large a body takes one to two seconds of a core, in one call. An error for each element took minutes.
_LONGEST_GAP = 15.0
JSON = "application/json"
WAYS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BODY = {"prompt": [5, 6, 7], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def filled(start: bytes, piece: bytes, end: bytes = b"", size: int = _SIZE) -> bytes:
    """Repeat a piece up to the size."""
    return start + piece * ((size - len(start) - len(end)) // len(piece)) + end


MESSAGE = b'{"role": "user", "content": "a"}'
# way, content type, body, status
BAD = {
    "a wrong element after token ids": ("completions", JSON, filled(b'{"prompt": [', b"1,", b'"a"]}'), 400),
    "a wrong element after texts": ("completions", JSON, filled(b'{"prompt": [', b'"a",', b"1.5]}"), 400),
    "too many texts": ("completions", JSON, filled(b'{"prompt": [', b'"a",', b'"a"]}'), 400),
    "deep lists": ("completions", JSON, filled(b'{"prompt": ', b"["), 400),
    "deep objects": ("completions", JSON, filled(b'{"prompt": ', b'{"a":'), 400),
    "a huge number": ("completions", JSON, filled(b'{"prompt": [', b"9", b"]}"), 400),
    "huge numbers": ("completions", JSON, filled(b'{"prompt": [', b"9" * 400 + b",", b"9]}"), 400),
    "a wrong field after many messages": (
        "chat",
        JSON,
        filled(b'{"messages": [', MESSAGE + b",", MESSAGE + b'], "max_tokens": 1, "min_tokens": 2}'),
        400,
    ),
    "a wrong one after many messages": ("chat", JSON, filled(b'{"messages": [', MESSAGE + b",", b"1]}"), 400),
    "no UTF-8": ("completions", JSON, filled(b'{"prompt": "', b"\xff", b'"}'), 400),
    "no UTF-8 at the end": ("completions", JSON, filled(b'{"prompt": "', b"a", b'\xff"}'), 400),
    "too long a text": ("completions", JSON, filled(b'{"prompt": "', b"a b ", b'"}', _LONG_TEXT), 400),
    "another type": ("completions", "text/plain", filled(b'{"prompt": "', b"a", b'"}'), 415),
    "too large": ("completions", JSON, 2 * filled(b'{"prompt": "', b"a", b'"}'), 413),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of `speculator serve`; its tiny target has a long context, so that it takes the largest bodies."""
    folder = tmp_path_factory.mktemp("target")
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size, config.eos_token_id, config.max_position_embeddings = 300, 0, 1 << 20
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CALLS
    tokenizer.save_pretrained(folder)
    process = forked.Popen(["-m", "speculator", "serve", "--target", str(folder), "--port", "0", "--max_num_seqs", "8"])
    try:
        assert process.stderr.readline().startswith("loading ")
        yield re.search(r"127\.0\.0\.1:\d+", process.stderr.readline()).group()
    finally:
        process.kill()


def send(address: str, way: str, kind: str, body: bytes) -> tuple[int, str]:
    """Send a body and return the status and the message of the answer."""
    connection = http.client.HTTPConnection(address, timeout=200)
    try:
        # A server may answer, and close, before it has read a body that is too large.
        with contextlib.suppress(BrokenPipeError):
            connection.request("POST", WAYS[way], body, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]["message"]
    finally:
        connection.close()


def test_streams_go_on_while_bad_bodies_are_refused(server):
    now = "no bad bodies"
    gaps = dict.fromkeys([now, *BAD], 0.0)

    async def listen(client: httpx.AsyncClient) -> None:
        while now:
            async with client.stream("POST", "/v1/completions", json=BODY) as response:
                last = 0.0
                async for _ in response.aiter_bytes():
                    at = time.monotonic()
                    if last and now:
                        gaps[now] = max(gaps[now], at - last)
                    last = at

    async def work() -> None:
        nonlocal now
        async with httpx.AsyncClient(base_url=f"http://{server}", timeout=200) as client:
            streams = [asyncio.create_task(listen(client)) for _ in range(8)]
            await asyncio.sleep(5)
            print(f"{gaps[now]:.3f} s: {now}", flush=True)
            for now, (way, kind, body, status) in BAD.items():
                found, message = await asyncio.to_thread(send, server, way, kind, body)
                assert (found, len(message) < 300) == (status, True), (now, message)
                print(f"{gaps[now]:.3f} s: {now}", flush=True)
            now = ""
            await asyncio.gather(*streams)

    asyncio.run(work())
    assert max(gaps.values()) < _LONGEST_GAP, gaps
