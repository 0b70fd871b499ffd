"""`eval --server --clients`: what clients wait for, and where drafting stops paying."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import exit_code
from hidden_state_server import StandIn

from eval.__main__ import main
from eval.in_server import _parts, training_hours
from eval.load import Asking
from eval.served import Level, Served, compare, figures, table
from eval.suites import Suite
from speculator import Sampling, Target, UserError
from speculator.files import read_json, write_json


class Client:
    """A server's client whose answer to prompt [n] takes n milliseconds and has n tokens; it knows who waits.

    A prompt that begins with `bad` gets none.
    """

    def __init__(self, bad=None):
        self.completions, self.waiting, self.asked, self.bad = self, 0, [], bad

    async def create(self, *, prompt, **_):
        self.waiting += 1
        self.asked.append((prompt[0], self.waiting))

        async def events():
            await asyncio.sleep(prompt[0] / 2000)
            if prompt[0] == self.bad:
                raise UserError("it has failed")
            yield SimpleNamespace(choices=[1], usage=None)
            await asyncio.sleep(prompt[0] / 2000)
            self.waiting -= 1
            yield SimpleNamespace(choices=[], usage=SimpleNamespace(completion_tokens=prompt[0]))

        return events()


@pytest.mark.parametrize("clients", [1, 3])
def test_all_clients_are_busy_until_the_last_counted_answer(clients):
    client = Client()
    asking = Asking(client=client, model="m", sampling=Sampling(), max_new_tokens=9)
    lengths = [20, 1, 2, 60, 3]
    prompts = [[length] for length in lengths]

    async def read():
        return len(client.asked)

    answers, seen = asyncio.run(asking.ask(prompts, clients, read))
    assert [answer.tokens for answer in answers] == lengths, "in the order of the prompts"
    assert all(answer.first < answer.seconds for answer in answers)
    assert [prompt for prompt, _ in client.asked[:5]] == lengths
    assert seen == (5 if clients > 1 else None), "its counters are read before others are asked"
    assert client.waiting == 0, "none runs into the next load"
    assert (len(client.asked) > 5) == (clients > 1), "others ask again while the longest answer lasts"
    assert min(waiting for _, waiting in client.asked[clients:]) >= clients - 1, "two may end at the same time"


def test_a_rate_sends_each_prompt_once_and_its_time_begins_when_it_is_due():
    client = Client()
    asking = Asking(client=client, model="m", sampling=Sampling(), max_new_tokens=9, rate=1000.0)
    answers, _ = asyncio.run(asking.ask([[20]] * 6, 1))
    assert len(client.asked) == 6
    assert answers[-1].seconds > 0.08, "it waited for five others"


def test_an_uncounted_request_that_fails_ends_nothing():
    async def read():
        return 0

    client = Client(bad=7)
    asking = Asking(client=client, model="m", sampling=Sampling(), max_new_tokens=9)
    prompts = [[20, 7], [1, 7], [60, 7]]
    answers, _ = asyncio.run(asking.ask(prompts, 3, read))
    assert [answer.tokens for answer in answers] == [20, 1, 60]
    assert 7 in [prompt for prompt, _ in client.asked]
    with pytest.raises(UserError, match="it has failed"):
        asyncio.run(asking.ask([[1], [7]], 2, read))


def test_the_figures_of_a_load_equal_those_by_hand():
    """Two clients: 30 tokens in 4 busy seconds. Tokens after the first take 100, 200 and 100 ms; one has none."""
    answers = [[11, 0.2, 1.2], [6, 0.5, 1.5], [12, 0.1, 1.2], [1, 0.1, 0.1]]
    found = figures(answers, 2, None, {"ttft": 300, "tpot": 150})
    assert found["tokens_per_second"] == pytest.approx(30 / 2)
    assert found["tpot_ms"][0] == pytest.approx(100)
    assert found["ttft_ms"][0] == pytest.approx(150)
    assert found["answer_ms"][0] == pytest.approx(1200)
    assert (found["within"], found["goodput"]) == (0.75, pytest.approx(3 / 2))
    assert figures(answers, 2, 5.0, {})["goodput"] == pytest.approx(4 / 5)
    # Of 100 answers 4 miss one limit and 4 others the second: 92 keep both, and 95 would do.
    answers = [[11, 0.9 if n < 4 else 0.1, 9.0 if 4 <= n < 8 else 1.1] for n in range(100)]
    made = replace(level(1, 0.0, 1.0), **figures(answers, 1, None, {"ttft": 300, "tpot": 150}))
    assert (made.within, made.keeps, replace(made, within=0.95).keeps) == (0.92, False, True)


def level(clients, temperature, speed, accepted=0, **limits) -> Level:
    """A level of 8 answers of 40 tokens, with some spread, `speed` times as fast as one second each."""
    answers = [[40, 0.1 / speed, (1 + 0.01 * (n % 3)) / speed] for n in range(8)]
    found = figures(answers, clients, None, limits)
    drafts = {"steps": 100, "accepted_tokens": accepted, "accepted_per_position": [], "drafted_tokens": None}
    where = {"suite": "s", "digest": str(clients), "temperature": temperature, "max_new_tokens": 40, "rate": None}
    return Level(clients=clients, answers=answers, **where, **found, **drafts)


def served(curves, accepted=0, **changes) -> Served:
    """Curves are {temperature: {clients: speed}}."""
    limits = changes.get("slo", {})
    made = [level(n, t, s, accepted, **limits) for t, curve in curves.items() for n, s in curve.items()]
    empty = {"slo": {}, "price": None, "hours": None, "forecast": None, "target": "t"}
    return Served(server="u", speculator=None, date="", argv=[], suites=made, **{**empty, **changes})


PLAIN = {t: {1: 1.0, 4: 0.9, 16: 0.5} for t in (0.0, 1.0)}


def test_the_number_of_clients_at_which_drafting_stops_paying_is_that_of_the_worst_temperature():
    """At temperature 1 the speedup falls from 1.4 at 4 clients to 0.8 at 16: to 1 at 4 * 4 ** (2 / 3), about 10."""
    drafted = {0.0: {1: 2.0, 4: 1.5, 16: 0.6}, 1.0: {1: 1.5, 4: 1.4 * 0.9, 16: 0.8 * 0.5}}
    text, speedups = compare(served(PLAIN), served(drafted, accepted=90))
    assert "verdict: drafting is worth serving up to 4 clients (s, temperature 1); it stops paying at about 10" in text
    assert [round(each.value, 2) for *_, each in speedups["s, temperature 1"]] == [1.5, 1.4, 0.8]
    assert "| s, temperature 0 | 4 | 1.67 (1.67 to 1.67) | 0% | 142.8 -> 237.9 |" in text
    text, _ = compare(served(PLAIN), served({0.0: drafted[0.0]}, accepted=90))
    assert "up to 16 clients (s, temperature 0); it is nowhere slower, up to 16" in text
    slow = served({0.0: {4: 0.8}}, accepted=90, target="u")
    text, _ = compare(served(PLAIN), slow)
    assert "verdict: drafting is not shown to pay (s, temperature 0); it is slower already at 4" in text
    assert "5 rows are of one server only" in text
    assert {"A: u, target t, ", "B: u, target u, "} <= set(text.splitlines())
    assert "verdict: B is not shown to pay" in compare(served(PLAIN, accepted=5), slow)[0]


def test_the_share_of_the_prompts_that_get_slower_is_that_of_whole_answers():
    """One of 8 answers takes twice as long, and the others half as long."""
    before = served({0.0: {1: 1.0}})
    (own,) = before.suites
    slow = [[tokens, first, seconds * (2 if n == 3 else 0.5)] for n, (tokens, first, seconds) in enumerate(own.answers)]
    text, _ = compare(before, replace(before, suites=[replace(own, answers=slow)]))
    assert ") | 12% | " in text


def test_a_token_costs_what_the_fastest_level_within_the_limits_costs():
    """Within 30 ms a token are 1 and 4 clients: 36 an hour for 142.75 tokens a second are 70.1 per million."""
    limits = {"price": 36.0, "slo": {"tpot": 30.0}}
    plain = served({0.0: PLAIN[0.0]}, **limits)
    assert plain.suites[1].tokens_per_second == pytest.approx(142.75, abs=0.01)
    assert "s, temperature 0: costs 70.1 per million tokens, with 4 clients" in table(plain)
    fast = served({0.0: {1: 2.0, 4: 1.8, 16: 0.6}}, accepted=90, **limits, hours=10.0)
    text, _ = compare(plain, fast)
    assert "A costs 70.1 per million tokens, with 4 clients; B costs 35 per million tokens, with 4 clients" in text
    assert "10.0 hours of training are paid after 10.3 million tokens" in text
    text, _ = compare(plain, replace(fast, hours=None))
    assert "each hour of training at this price is paid after 1.0 million" in text
    assert compare(plain, replace(fast, price=None))[0] == compare(plain, fast)[0], "one price is that of both"
    assert "a training does not pay" in compare(fast, replace(plain, hours=1.0))[0]
    limits["slo"] = {"tpot": 15.0}
    none, fast = (served(curves, **limits) for curves in ({0.0: PLAIN[0.0]}, {0.0: {1: 2.0, 4: 1.8, 16: 0.6}}))
    assert "keeps the limits at no number of clients" in table(none)
    text, _ = compare(none, fast)
    assert "A keeps the limits at no number of clients; B costs 35 per million" in text
    assert "training" not in text
    text, _ = compare(plain, fast)
    assert "A and B have other limits (--slo)" in text
    assert "per million" not in text


def test_a_load_at_a_rate_has_no_cost_and_no_verdict_on_its_clients():
    made = served({0.0: PLAIN[0.0]}, price=36.0)
    paced = replace(made, suites=[replace(level, rate=2.0) for level in made.suites])
    made.suites[0] = replace(made.suites[0], steps=0, accepted_per_position=[0, 0, 0])
    assert table(made).splitlines()[2].endswith("|  |  |  |"), "it drafted nothing, so there are no shares"
    text, _ = compare(paced, paced)
    for word in ("per million", "verdict"):
        assert word in compare(made, made)[0]
        assert word not in text + table(paced)


def test_the_hours_of_a_training_are_those_of_its_logs(tmp_path):
    """Of 100 steps 80 took 40 seconds, and 20 more take 10; the last entry has none left, and text took 50 seconds."""
    history = [{"step": step, "seconds_left": left} for step, left in ((40, 99.0), (80, 10.0), (100, 0.0))]
    for number, entries in ((80, history[:2]), (100, history)):
        folder = tmp_path / "stage1" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        write_json(folder / "trainer_state.json", {"max_steps": 100, "log_history": entries})
    (tmp_path / "generated").mkdir()
    write_json(tmp_path / "generated" / "manifest.json", {"seconds": 50.0})
    assert training_hours(tmp_path) == pytest.approx(100 / 3600)
    assert training_hours(tmp_path / "speculator") is None
    (tmp_path / "stage2").mkdir()
    assert training_hours(tmp_path) is None, "those of one stage are not known"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--clients 2", "--clients needs --server"),
        *(
            (f"--{flag} --server URL", f"--{flag.split()[0]} needs --clients")
            for flag in ("price 2", "rate 2", "slo ttft=5")
        ),
        ("--slo tpot=x --server URL", "is not of the form ttft=500,tpot=50"),
        ("--slo latency=5 --server URL", "is not of the form ttft=500,tpot=50"),
        ("--clients 0 --server URL", "--clients must be at least 1"),
        ("--clients 2 2 --server URL", "--clients: a value is given twice"),
        ("--rate 0 --server URL", "--rate must be above 0"),
        ("--price -1 --server URL", "--price must be above 0"),
        ("", "--speculator is required"),
    ],
)
def test_flags_of_a_load_that_are_wrong_are_named(flags, message, tmp_path, capsys):
    own = [] if not flags or "URL" in flags else ["--speculator", "S"]
    argv = ["--target", "T", "--output", str(tmp_path), *own, *flags.replace("URL", "http://127.0.0.1:9").split()]
    assert exit_code(main, argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_each_load_has_prompts_of_its_own_and_four_of_each_client_at_least(capsys):
    suite = Suite("s", [[n] for n in range(100)])
    parts = [part.prompts for part in _parts(suite, 8, [4, 16, 64])]
    assert [len(part) for part in parts] == [8, 16, 64]
    assert [prompt for part in parts for prompt in part] == suite.prompts[:88]
    assert [len(part.prompts) for part in _parts(suite.first(85), 8, [4, 16, 64])] == [5, 16, 64]
    assert capsys.readouterr().err == "s has only 85 prompts, so the loads have 5, 16, 64 and not all --max_prompts 8\n"
    with pytest.raises(UserError, match="s has 83 prompts, and these loads need 84"):
        _parts(suite.first(83), 8, [4, 16, 64])


@pytest.fixture
def argv(target_folder, text_file, tmp_path):
    server = StandIn(Target.load(str(target_folder), device="cpu"), tmp_path, [2], fault="connector")
    flags = ["--server", server.url, "--target", str(target_folder), "--suite", str(text_file), "--temperature", "0"]
    yield [*flags, "--prompt_tokens", "8", "--max_prompts", "8"]
    server.die()


def test_two_servers_are_measured_and_compared_with_a_plot(argv, tmp_path, capsys):
    argv += ["--max_new_tokens", "4", "--max_prompts", "4", "--temperature", "1"]  # besides 0
    for name, clients in (("a", "12"), ("b", "213")):
        assert main([*argv, "--clients", *clients, "--output", str(tmp_path / name)]) == 0
    assert exit_code(main, [*argv, "--clients", "64", "--output", str(tmp_path / "c")]) == 2
    assert "and these loads need 512" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    rows = [read_json(tmp_path / name / "served.json")["suites"] for name in ("a", "b")]
    loads = [[(row["temperature"], row["clients"], row["digest"]) for row in each] for each in rows]
    assert sorted(load[:2] for load in loads[0]) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert len({digest for *_, digest in loads[1]}) == 6, "each load has prompts of its own"
    assert set(loads[0]) < set(loads[1]), "the same ones whatever other loads there are"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "served.json")]) == 0
    said = capsys.readouterr().out
    assert f"plot: {tmp_path / 'b' / 'compared.png'}" in said
    assert "2 rows are of one server only" in said
    for plot in ("a/load.png", "b/compared.png"):
        assert (tmp_path / plot).read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "report.json").write_text("{}")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "one is of a server, and the other is not" in capsys.readouterr().err
    (tmp_path / "b" / "report.json").write_text("{}")
    assert main(["compare", str(tmp_path), str(tmp_path / "b")]) == 2
    assert "report.json is not a report.json" in capsys.readouterr().err, "both have a report"


def test_the_warm_up_asks_no_prompt_of_a_load(argv, tmp_path, monkeypatch):
    answer, asked = Asking.answer, []

    async def note(self, prompt, *given):
        asked.append((self.max_new_tokens, tuple(prompt)))
        return await answer(self, prompt, *given)

    monkeypatch.setattr(Asking, "answer", note)
    assert main([*argv, "--max_new_tokens", "9", "--clients", "2", "--output", str(tmp_path / "made")]) == 0
    warm = {prompt for tokens, prompt in asked if tokens == 8}
    assert len(warm) == 2
    assert not warm & {prompt for _, prompt in asked[2:10]}
