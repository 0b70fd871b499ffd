"""Concurrent requests: texts, freed slots, and failures of the engine."""

import asyncio
import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from conftest import alternating_drafter
from serving_here import serving, tiny_head_for, until

from speculator import Engine, HeadDrafter, Sampling, UserError, generate
from speculator.decoding import prefill
from speculator.target.cache.kv_cache import KVCache

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
    """Tokens of an answer; with `leave_after`, disconnect after that many events."""
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
def test_texts_do_not_depend_on_the_other_requests(chat_target, drafter, count, at_a_time):
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


def test_prompts_that_are_tokenized_at_the_same_time_do_not_mix(chat_target):
    tokenizer = chat_target.tokenizer
    texts = [f"def f{i}(x):" + " x +" * i for i in range(12)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    with serving(chat_target, max_queue=100) as (url, _):

        async def ask_all() -> list[dict]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                common = {"max_tokens": 1, "return_token_ids": True}
                bodies = [("/v1/completions", {"prompt": text}) for text in texts]
                bodies += [("/v1/chat/completions", {"messages": chat}) for chat in chats]
                answers = await asyncio.gather(*(client.post(path, json=body | common) for path, body in bodies))
                return [answer.json() for answer in answers]

        made = asyncio.run(ask_all())
    ids = [answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"] for answer in made]
    expected = [tokenizer(text)["input_ids"] for text in texts]
    expected += [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    assert ids == expected


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(chat_target, stream):
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
        until(lambda: worker.in_use == 0, 1.0)  # 240 steps would take 4.8 s
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [3], "max_tokens": 3})
        assert answer.status_code == 200
        page = httpx.get(f"{url}/metrics").text
        assert 'speculator_answers_total{finish_reason="cancelled"} 1.0' in page


def test_waiting_requests_of_disconnected_clients_are_dropped(chat_target):
    started, gate = threading.Event(), threading.Event()

    class Held(Engine):
        def step(self):
            started.set()
            gate.wait(20)
            return super().step()

    with serving(chat_target, slots=1, engine=Held, max_queue=2) as (url, worker):
        with httpx.Client(base_url=url, timeout=0.3) as client:
            for _ in range(6):
                with contextlib.suppress(httpx.ReadTimeout):
                    answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 3})
                    assert answer.status_code == 429, "dropped requests do not count"
        until(lambda: worker.load == 0)
        assert started.is_set()
        gate.set()
        until(lambda: not worker.engine.waiting and worker.in_use == 0)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 3}).status_code == 200


def test_an_engine_that_fails_is_created_again(chat_target, caplog):
    class Failing(Engine):
        def enqueue(self, request):
            if request.prompt[0] == 13:
                raise RuntimeError("the device is gone")
            return super().enqueue(request)

        def step(self):
            if any(request.prompt[0] == 17 for request in self.waiting):
                raise UserError("its logits are not finite: load it in bfloat16")
            return super().step()

    with serving(chat_target, engine=Failing) as (url, worker):
        first = worker.engine
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [17], "max_tokens": 3})
        assert (answer.status_code, answer.json()["error"]["message"][-8:]) == (500, "bfloat16")
        assert 'speculator_answers_total{finish_reason="failed"} 1.0' in httpx.get(f"{url}/metrics").text
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": [13], "max_tokens": 3, "stream": stream})
            assert "server_error" in answer.text
            assert answer.status_code == (200 if stream else 500)
        assert worker.engine is not first
        expected = generate(chat_target, None, [[3, 4]], max_new_tokens=5).tokens[0]
        body = {"prompt": [3, 4], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
        assert httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["token_ids"] == expected
    assert "the device is gone" in caplog.text


def test_a_request_that_the_engine_ends_alone_is_an_error_alone(chat_target):
    class Ending(Engine):
        def process(self, batch, *given):
            for request in batch.requests:
                if request.prompt[0] == 17:
                    request.fail("not_finite", "its logits are not finite")
            super().process(batch, *given)

    body = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with serving(chat_target, engine=Ending) as (url, worker), ThreadPoolExecutor(2) as threads:
        engine = worker.engine
        posts = [threads.submit(httpx.post, f"{url}/v1/completions", json={**body, "prompt": [n]}) for n in (17, 9)]
        failed, other = (post.result(20) for post in posts)
        assert (failed.status_code, "not finite" in failed.json()["error"]["message"]) == (500, True)
        assert other.json()["choices"][0]["token_ids"] == generate(chat_target, None, [[9]], max_new_tokens=8).tokens[0]
        assert worker.engine is engine
        until(lambda: worker.load == 0 and worker.in_use == 0)


def test_requests_that_only_wait_outlive_a_failed_engine(chat_target, caplog):
    gate = threading.Event()

    class FailingOnce(Engine):
        failed = False

        def step(self):
            left = super().step()
            if not FailingOnce.failed and gate.wait(20) and self.waiting:
                FailingOnce.failed = True
                raise RuntimeError("the device is gone")
            return left

    body = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    with (
        serving(chat_target, slots=1, engine=FailingOnce) as (url, worker),
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(httpx.post, f"{url}/v1/completions", json={**body, "prompt": [9]})
        until(lambda: worker.in_use == 1)
        second = threads.submit(httpx.post, f"{url}/v1/completions", json={**body, "prompt": [3, 4], "n": 2})
        until(lambda: worker.load == 3)
        gate.set()
        assert first.result(10).status_code == 500
        expected = generate(chat_target, None, [[3, 4]], max_new_tokens=5).tokens[0]
        assert [choice["token_ids"] for choice in second.result(10).json()["choices"]] == [expected] * 2
    assert "the device is gone" in caplog.text


def test_an_engine_that_fails_without_a_job_in_flight_fails_those_that_wait(chat_target):
    class Failing(Engine):
        def step(self):
            raise RuntimeError("the device is gone")

    with serving(chat_target, engine=Failing) as (url, worker):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [3], "max_tokens": 3}, timeout=5)
        assert answer.status_code == 500
        assert worker.load == 0


def test_requests_fail_at_once_if_the_engine_can_not_be_created_again(chat_target, caplog):
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
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        until(lambda: not worker.alive)
        assert httpx.get(f"{url}/health").status_code == 503
        assert worker.load == 0
    assert "the device is gone for good" in caplog.text


def shapes_taken(monkeypatch) -> list:
    seen = []
    step = Engine.step

    def noting(self):
        left = step(self)
        seen.append(
            (sum(slot.request is not None for slot in self.scheduler.slots), self.drafter and self.drafter.shape)
        )
        return left

    monkeypatch.setattr(Engine, "step", noting)
    return seen


def test_adaptive_drafting_gives_the_plain_texts_at_any_load(chat_target, monkeypatch):
    auto = alternating_drafter(tiny_head_for(chat_target))
    seen = shapes_taken(monkeypatch)
    bodies = mixes(12, chat_target.vocab_size)
    with serving(chat_target, auto) as (url, _):

        async def ask_all(bodies: list[dict]) -> list[list[int]]:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                return await asyncio.gather(*(ask(client, body, None, False) for body in bodies))

        made = asyncio.run(ask_all(bodies))
        assert len({id(shape) for _, shape in seen}) > 2
    assert made == by_generate(chat_target, None, bodies)


@pytest.mark.parametrize(
    ("drafting", "first"),
    [
        (True, True),
        (False, False),
        *(pytest.param(drafting, not drafting, marks=pytest.mark.soak) for drafting in (True, False)),
    ],
)
def test_a_request_too_large_for_memory_fails_alone(chat_target, monkeypatch, first, drafting):
    """Seven others finish with their own texts, whether the cache is made for it or has to grow."""
    drafter = HeadDrafter(tiny_head_for(chat_target)) if drafting else None
    capacity, make = 128, KVCache.__init__

    def limited(original):
        def allocate(self, *arguments):
            wanted = arguments[2] if original is make else arguments[-1]
            if wanted > capacity:
                raise torch.OutOfMemoryError("no room")
            return original(self, *arguments)

        return allocate

    prompts = [[i + 1] * 6 for i in range(7)]
    large = [5] * 180
    expected = [generate(chat_target, drafter, [prompt], max_new_tokens=40).tokens[0] for prompt in prompts]
    monkeypatch.setattr(KVCache, "__init__", limited(make))
    monkeypatch.setattr(KVCache, "grow", limited(KVCache.grow))
    with serving(chat_target, drafter, slots=8) as (url, worker):
        engine = worker.engine

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

        if not first:
            assert ask(prompts[0]).status_code == 200
        with ThreadPoolExecutor(8) as threads:
            refused, *answers = threads.map(ask, [large, *prompts])
        again = ask(prompts[0])
        assert worker.engine is engine, "the engine was not created again"
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "out_of_memory"
    for answer, own in zip([*answers, again], [*expected, expected[0]], strict=True):
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["token_ids"] == own


def test_a_request_whose_logits_are_not_finite_fails_alone(chat_target, monkeypatch):
    real = prefill.first_tokens

    def broken(target, requests, hidden):
        first, _, logprobs = real(target, requests, hidden)
        return first, [request.prompt[0] != 17 for request in requests], logprobs

    expected = generate(chat_target, None, [[3, 4]], max_new_tokens=30).tokens[0]
    monkeypatch.setattr(prefill, "first_tokens", broken)
    with serving(chat_target) as (url, worker):
        engine = worker.engine

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "return_token_ids": True}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

        with ThreadPoolExecutor(2) as threads:
            answer, failed = threads.map(ask, [[3, 4], [17]])
        assert worker.engine is engine, "the engine was not created again"
        assert 'speculator_answers_total{finish_reason="not_finite"} 1.0' in httpx.get(f"{url}/metrics").text
    assert answer.json()["choices"][0]["token_ids"] == expected
    assert (failed.status_code, "not finite" in failed.json()["error"]["message"]) == (500, True)
    assert (failed.json()["error"]["code"], failed.headers["x-should-retry"]) == ("not_finite", "false")


def test_generating_without_enough_memory_is_an_error(target, monkeypatch):

    def refuse(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(KVCache, "grow", refuse)
    engine = Engine(target, slots=2, capacity=32)
    engine.generate([[1, 2, 3]], max_new_tokens=8)
    with pytest.raises(UserError, match="60 tokens"):
        engine.generate([[4] * 60], max_new_tokens=8).check()
    assert not engine.busy
