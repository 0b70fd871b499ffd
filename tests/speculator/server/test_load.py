"""`POST /v1/speculator/load`: another head while requests are decoded."""

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from conftest import alternating_drafter, exit_code, tiny_head
from serving_here import serving, tiny_head_for, until

from speculator import Engine, HeadDrafter, Sampling, generate
from speculator.__main__ import build_parser, main
from speculator.checkpoints.loading import bind
from speculator.cli import model_flags, serve
from speculator.files import write_manifest
from speculator.server.errors import APIError

BODY = {"prompt": [5, 6, 7], "max_tokens": 120, "return_token_ids": True}


def drafters(target):
    """Heads with different memories per row: a hidden state, keys and values, and n-gram lookup next to a head."""
    attention = tiny_head(architecture="eagle3", vocab_size=target.vocab_size).double()
    return [
        HeadDrafter(tiny_head_for(target)),
        HeadDrafter(bind(attention, target)),
        alternating_drafter(tiny_head_for(target)),
    ]


@pytest.mark.parametrize("rule", [None, "rejection"])
def test_requests_in_flight_keep_their_text_when_the_drafter_is_replaced(chat_target, rule):
    first, second, adaptive = drafters(chat_target)
    engine = Engine(chat_target, first, slots=3, rule=rule)
    how = [Sampling(0.0), Sampling(0.9, seed=3), Sampling(0.0), Sampling(1.0, seed=5)]
    prompts = [[5, 6, 7], [9], list(range(1, 40)), [5, 6, 7, 8, 9]]
    requests = [engine.submit(prompt, each, max_new_tokens=60) for prompt, each in zip(prompts, how, strict=True)]
    for drafter in (second, None, second) if rule else (second, adaptive, None, second):
        for _ in range(4):
            engine.step()
        assert engine.busy
        engine.replace_drafter(drafter)
    engine.run()
    plain = generate(chat_target, None, prompts, how, max_new_tokens=60).tokens
    for request, tokens in zip(requests, plain, strict=True):
        if request.sampling.greedy or rule is None:
            assert request.tokens == tokens
        assert sum(step.emitted for step in request.steps) == len(request.tokens) - 1


def test_a_drafter_replaced_in_flight_accepts_as_much_as_one_from_the_start(chat_target):
    """Drafts depend on the whole text, so the new drafter has read it."""
    _, attention, _ = drafters(chat_target)
    whole = generate(chat_target, attention, [[5, 6, 7]], max_new_tokens=80)
    engine = Engine(chat_target, None, slots=1)
    request = engine.submit([5, 6, 7], max_new_tokens=80)
    while len(request.tokens) < 20:
        engine.step()
    engine.replace_drafter(attention)
    engine.run()
    ends = []
    for steps in (request.steps, whole.steps[0]):
        place, by_place = 1, {}
        for step in steps:
            by_place[place] = (step.drafted, step.accepted)
            place += step.emitted
        ends.append(by_place)
    common = [place for place in ends[0] if place > 22 and place in ends[1]]
    assert len(common) > 10
    assert all(ends[0][place] == ends[1][place] for place in common)


def test_prefixes_of_earlier_requests_are_read_again_for_the_new_drafter(chat_target):
    _, attention, _ = drafters(chat_target)
    prompt = list(range(1, 40))
    engine = Engine(chat_target, None, slots=1)
    engine.generate([prompt], max_new_tokens=2)
    engine.replace_drafter(attention)
    engine.generate([prompt], max_new_tokens=2)
    assert engine.num_prefilled_tokens == 2 * len(prompt)


def test_the_old_head_is_freed_and_a_failed_engine_gets_the_new_one(chat_target):
    heads = []

    def made() -> HeadDrafter:
        drafter = HeadDrafter(tiny_head_for(chat_target))
        heads.append(weakref.ref(drafter.head))
        return drafter

    with serving(chat_target) as (url, worker):
        for _ in range(3):
            httpx.post(f"{url}/v1/completions", json=BODY)
            asyncio.run_coroutine_threadsafe(worker.replace_drafter(made), worker._loop).result(20)
            gc.collect()
            assert [head() is None for head in heads] == [True] * (len(heads) - 1) + [False]
        # The engine fails at the next request and is created again, with the newest head.
        failing = worker.engine
        failing.step = lambda: 1 / 0 if failing.waiting else None
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 500
        until(lambda: worker.engine is not failing)
        assert worker.engine.drafter.head is heads[-1]()


def test_a_head_that_waits_while_the_engine_fails_for_good_is_an_error(chat_target):
    with serving(chat_target) as (url, worker), ThreadPoolExecutor() as threads:
        reached, go = threading.Event(), threading.Event()

        def fail() -> None:
            reached.set()
            go.wait(10)
            raise RuntimeError("the device is lost")

        worker.engine.step, worker._make_engine = fail, lambda _: fail()
        answer = threads.submit(httpx.post, f"{url}/v1/completions", json=BODY)
        assert reached.wait(10)
        loading = asyncio.run_coroutine_threadsafe(worker.replace_drafter(lambda: None), worker._loop)
        until(lambda: worker._loads)
        go.set()
        assert answer.result(10).status_code == 500
        with pytest.raises(APIError):
            loading.result(10)


@pytest.fixture
def heads(chat_target, tmp_path):
    """Folders of a good head, a damaged one, one for another target, and one that does not fit."""
    folders = {}
    for name, fingerprint in (("good", chat_target.fingerprint), ("foreign", "another:0000"), ("damaged", None)):
        head = tiny_head_for(chat_target).float()
        head.config.base_model_fingerprint = fingerprint
        head.save_pretrained(tmp_path / name)
        write_manifest(tmp_path / name)
        folders[name] = str(tmp_path / name)
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"damaged!")
    tiny_head(vocab_size=chat_target.vocab_size + 1).save_pretrained(tmp_path / "large")
    return {**folders, "large": str(tmp_path / "large"), "nowhere": str(tmp_path / "nowhere")}


def loader(target):
    arguments = ["--target", "tiny", "--num_speculative_tokens", "3"]
    arguments += ["--speculator", "org/head", "--speculator_revision", "v1"]
    make_drafter = partial(model_flags.drafter, target=target, temperatures=[0.0, 1.0])
    return partial(serve._load, build_parser("serve").parse_args(arguments), target, make_drafter)


def test_a_head_that_does_not_fit_is_an_error_and_the_old_one_stays(chat_target, drafter, heads):
    with serving(chat_target, drafter, load_drafter=loader(chat_target), head="first") as (url, worker):
        before = httpx.post(f"{url}/v1/completions", json={**BODY, "temperature": 0}).json()["choices"]

        def load(body: dict) -> tuple[int, bool]:
            old = worker.engine.drafter.head
            status = httpx.post(f"{url}/v1/speculator/load", json=body).status_code
            return status, worker.engine.drafter.head is old

        for name in ("foreign", "damaged", "large", "nowhere"):
            assert load({"path": heads[name]}) == (400, True), name
        assert load({"paht": heads["good"]}) == (400, True)
        assert load({"path": "\0"}) == (400, True)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["speculator"] == "first"
        assert load({"path": heads["good"]}) == (200, False)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["speculator"] == heads["good"]
        assert "speculator_head_loads 1.0" in httpx.get(f"{url}/metrics").text
        assert load({"path": "org/head"}) == (400, True)

        def no_memory(*_):
            raise MemoryError

        worker.engine.replace_drafter = no_memory
        assert load({"path": heads["good"]}) == (500, True)
        after = httpx.post(f"{url}/v1/completions", json={**BODY, "temperature": 0}).json()["choices"]
        assert before == after


def test_the_route_needs_the_flag_and_the_flag_needs_a_key(chat_target, capsys, target_folder, monkeypatch):
    monkeypatch.delenv("SPECULATOR_API_KEY", raising=False)
    with serving(chat_target) as (url, _):
        assert httpx.post(f"{url}/v1/speculator/load", json={"path": "x"}).status_code == 404
    with serving(chat_target, load_drafter=loader(chat_target), api_key="secret") as (url, _):
        assert httpx.post(f"{url}/v1/speculator/load", json={"path": "x"}).status_code == 401
    assert exit_code(main, ["serve", "--target", str(target_folder), "--allow_load"]) == 2
    assert "--api_key" in capsys.readouterr().err


@pytest.mark.parametrize(("clients", "loads"), [(8, 6), pytest.param(32, 20, marks=pytest.mark.soak)])
def test_no_request_fails_and_greedy_texts_stay_under_load(chat_target, clients, loads):
    bodies = [{**BODY, "prompt": [1 + n % 50, 2, 3 + n], "temperature": n % 2, "seed": n} for n in range(clients)]
    plain = generate(
        chat_target,
        None,
        [body["prompt"] for body in bodies],
        [Sampling(body["temperature"], seed=body["seed"]) for body in bodies],
        max_new_tokens=120,
    ).tokens
    choices = drafters(chat_target)
    with serving(chat_target, choices[0], slots=8) as (url, worker):

        async def client(number: int) -> None:
            async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                while not done:
                    answer = await http.post("/v1/completions", json=bodies[number])
                    assert answer.json()["choices"][0]["token_ids"] == plain[number]

        async def replace() -> None:
            for number in range(1, 1 + loads):
                await asyncio.sleep(0.15)
                made = worker.replace_drafter(lambda number=number: choices[number % 3])
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(made, worker._loop))
            done.append(True)

        async def everything() -> None:
            await asyncio.gather(replace(), *map(client, range(clients)))

        done: list[bool] = []
        asyncio.run(everything())
        until(lambda: worker.load == 0)
