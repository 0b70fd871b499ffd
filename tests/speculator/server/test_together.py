"""Many at a time: texts as alone, slots that come free, and what becomes of the others when one goes wrong."""

import asyncio
import contextlib
import random
import socket
import threading
import time

import httpx
import pytest
from conftest import auto_drafter
from serving_here import serving, tiny_head_for, until

from speculator import Engine, HeadDrafter, NgramDrafter, Sampling, generate
from speculator.server.app import _Events
from speculator.server.guard import Limits

LONG = {"prompt": [9], "max_tokens": 240, "temperature": 1.0, "seed": 1, "stream": True}


def mixes(count: int, size: int, seed: int = 0) -> list[dict]:
    draw, found = random.Random(seed), []
    shared = [draw.randrange(1, size) for _ in range(30)]
    for _ in range(count):
        prompt = shared[: draw.randrange(20)] + [draw.randrange(1, size) for _ in range(draw.randrange(1, 12))]
        body = {"prompt": prompt, "max_tokens": draw.randrange(1, 40), "seed": draw.randrange(2**40)}
        body |= {"temperature": draw.choice([0, 0, 0.5, 1.0, 1.7]), "top_p": draw.choice([1.0, 0.9])}
        body |= {"top_k": draw.choice([-1, 0, 20]), "min_p": draw.choice([0.0, 0.01])}
        found.append(body)
    return found


def by_generate(target, drafter, bodies: list[dict]) -> list[list[int]]:
    names = ("temperature", "top_p", "min_p", "seed")
    how = [Sampling(top_k=max(body["top_k"], 0), **{name: body[name] for name in names}) for body in bodies]
    limits, prompts = [body["max_tokens"] for body in bodies], [body["prompt"] for body in bodies]
    return generate(target, drafter, prompts, how, max_new_tokens=limits, max_batch_size=8).tokens


async def ask(client: httpx.AsyncClient, body: dict, leave_after: int | None, stream: bool) -> list[int]:
    """The tokens; with `leave_after`, hang up behind so many events."""
    body = body | {"return_token_ids": True, "stream": stream}
    if not stream:
        answer = await client.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["token_ids"]
    tokens = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        events = 0
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                tokens += httpx.Response(200, content=line[6:]).json()["choices"][0]["token_ids"]
                events += 1
            if events == leave_after:
                break
    return tokens


@pytest.mark.parametrize(("count", "at_a_time"), [(40, 20), pytest.param(200, 40, marks=pytest.mark.soak)])
def test_texts_are_those_of_generate_whoever_comes_and_leaves(chat_target, drafter, count, at_a_time):
    bodies = mixes(count, chat_target.vocab_size)
    draw = random.Random(1)
    leaving = [draw.randrange(1, 4) if draw.random() < 0.25 else None for _ in bodies]
    streams = [left is not None or draw.random() < 0.5 for left in leaving]
    with serving(chat_target, drafter) as (url, worker):

        async def work() -> list[list[int]]:
            turns = asyncio.Semaphore(at_a_time)
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:

                async def one(*what) -> list[int]:
                    async with turns:
                        await asyncio.sleep(draw.random() * 0.02)
                        return await ask(client, *what)

                return await asyncio.gather(*map(one, bodies, leaving, streams))

        got = asyncio.run(work())
        until(lambda: worker.load == 0 and worker.in_use == 0)
    for expected, left, tokens in zip(by_generate(chat_target, drafter, bodies), leaving, got, strict=True):
        assert tokens == (expected if left is None else expected[: len(tokens)])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_gone_frees_its_slot(chat_target, stream):
    class Slow(Engine):
        def step(self):
            time.sleep(0.02)
            return super().step()

    with serving(chat_target, slots=1, engine=Slow) as (url, worker):
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(base_url=url, timeout=0.5) as client:
            if stream:
                with client.stream("POST", "/v1/completions", json=LONG) as response:
                    next(response.iter_lines())
                    assert worker.in_use == 1
            else:
                client.post("/v1/completions", json=LONG | {"stream": False})
        steps = len(worker.engine.slots.rows[0].text)
        until(lambda: worker.in_use == 0, 1.0)
        assert len(worker.engine.slots.rows[0].text) < steps + 20, "it was not decoded to its end"
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [3], "max_tokens": 3})
        assert answer.status_code == 200
        page = httpx.get(f"{url}/metrics").text
        assert 'speculator_answers_total{finish_reason="cancelled"} 1.0' in page


def test_those_who_wait_and_leave_are_forgotten(chat_target):
    started, gate = threading.Event(), threading.Event()

    class Held(Engine):
        def prefill(self):
            started.set()
            gate.wait(20)
            super().prefill()

    with serving(chat_target, slots=1, engine=Held, limits=Limits(queue=2)) as (url, worker):
        with httpx.Client(base_url=url, timeout=0.3) as client:
            for _ in range(6):
                with contextlib.suppress(httpx.ReadTimeout):
                    answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3})
                    assert answer.status_code == 429, "what left is not counted"
        until(lambda: worker.load == 0)
        assert started.is_set()
        gate.set()
        until(lambda: not worker.engine.waiting and worker.in_use == 0)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 3}).status_code == 200


def test_what_takes_too_long_is_cut(chat_target):
    class Slow(Engine):
        def step(self):
            time.sleep(0.05)
            return super().step()

    with serving(chat_target, slots=1, engine=Slow, limits=Limits(seconds=0.4)) as (url, worker):
        answer = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": False})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        streamed = httpx.post(f"{url}/v1/completions", json=LONG).text
        assert '"code": "timeout"' in streamed.strip().split("\n\n")[-1]
        until(lambda: worker.in_use == 0)


def test_an_engine_that_fails_is_made_anew(chat_target, caplog):
    class Failing(Engine):
        def _begin(self, requests, hidden):
            if any(request.prompt[0] == 13 for request in requests.values()):
                raise RuntimeError("the device is gone")
            super()._begin(requests, hidden)

    with serving(chat_target, engine=Failing) as (url, worker):
        first = worker.engine
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": [13], "max_tokens": 3, "stream": stream})
            assert "the engine failed" in answer.text
            assert answer.status_code == (200 if stream else 500)
        assert worker.engine is not first
        expected = generate(chat_target, None, [[3, 4]], max_new_tokens=5).tokens[0]
        body = {"prompt": [3, 4], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"] == expected
    assert "the device is gone" in caplog.text


def test_where_no_engine_can_be_made_anew_requests_are_refused_at_once(chat_target, caplog):
    class Broken(Engine):
        made = 0

        def __init__(self, *given, **how):
            Broken.made += 1
            if Broken.made > 1:
                raise RuntimeError("the device is gone for good")
            super().__init__(*given, **how)

        def step(self):
            raise RuntimeError("the device is gone")

    body = {"prompt": [3], "max_tokens": 3}
    with serving(chat_target, engine=Broken) as (url, worker):
        for _ in range(2):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=5)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine failed")
        until(lambda: not worker.alive)
        assert httpx.get(f"{url}/health").status_code == 503
        assert worker.load == 0
    assert "the device is gone for good" in caplog.text


def test_one_who_sends_no_end_is_cut_and_harms_nobody(chat_target):
    with serving(chat_target, limits=Limits(receive_seconds=0.3)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 3}).status_code == 200
            connection.settimeout(5)
            assert b" 504 " in connection.recv(1000)


def shapes_taken(monkeypatch) -> list:
    seen = []
    step = Engine.step

    def noting(self):
        left = step(self)
        seen.append((sum(slot.request is not None for slot in self.slots.rows), self.drafter and self.drafter.shape))
        return left

    monkeypatch.setattr(Engine, "step", noting)
    return seen


def test_where_drafts_are_chosen_a_seeded_text_is_drafted_for_as_alone(chat_target, monkeypatch):
    auto = auto_drafter(tiny_head_for(chat_target))
    seen = shapes_taken(monkeypatch)
    bodies = mixes(12, chat_target.vocab_size)[:6]
    greedy = [body | {"temperature": 0, "max_tokens": 30} for body in bodies]
    with serving(chat_target, auto) as (url, _):

        async def ask_all(bodies: list[dict]) -> list[list[int]]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                return await asyncio.gather(*(ask(client, body, None, False) for body in bodies))

        assert asyncio.run(ask_all(greedy)) == by_generate(chat_target, None, greedy)
        assert len({id(shape) for _, shape in seen}) > 2
        made = asyncio.run(ask_all(bodies))
    assert made == by_generate(chat_target, HeadDrafter(auto.head, auto.alone), bodies)


def test_n_gram_lookup_serves_too(chat_target):
    body = {"prompt": [5, 6, 5, 6, 5], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    with serving(chat_target, NgramDrafter()) as (url, _):
        tokens = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert tokens == generate(chat_target, None, [body["prompt"]], max_new_tokens=20).tokens[0]


def test_a_reader_who_is_cut_off_is_no_failure_of_the_server():
    closed = []

    async def events():
        while True:
            yield "data: {}\n\n"

    async def send(message):
        if message["type"] == "http.response.body":
            raise TimeoutError

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(_Events(events(), lambda: closed.append(1))(scope, asyncio.Event().wait, send))
    assert closed
