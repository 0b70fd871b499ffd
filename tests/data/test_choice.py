"""Who drafts the target's own text: the fastest here, none among them, and the same for all and after a kill."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from chat_targets import chatty, tiny_llama
from conftest import tiny_head, tiny_model, write_tuned

from data import batches, choice, onpolicy
from data.__main__ import main
from data.choice import Drafts, choose, identity
from data.magpie import self_rows
from data.onpolicy import generate_rows
from speculator import Engine, FixedTree, HeadDrafter, Sampling, Target, UserError

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 1], [9] * 7, [2, 2], [8, 7, 6]]
SPEEDS = {0: 50, 1: 40, 2: 60, 3: 45}
TREE = [[0], [1], [0, 0], [1, 0]]


@pytest.fixture(autouse=True)
def few_rows_pay(monkeypatch):
    monkeypatch.setattr(choice, "_SHARE", 99.0)
    monkeypatch.setattr(onpolicy, "_PIECE", 1)
    monkeypatch.setattr(batches, "_POLL_SECONDS", 0.01)


def clocked(monkeypatch, speeds):
    """Tokens per second of a draft of so many tokens; None: nobody may look at a clock."""

    def clock(engine, requests, most, how):
        assert speeds is not None, "the candidates are clocked"
        return speeds[engine.drafter.nodes if engine.drafter else 0], 1.0

    monkeypatch.setattr(choice, "_clock", clock)


def made(target, folder, drafter=None, **changes):
    settings = {"max_new_tokens": 12, "batch_size": 2, "progress": False, "seed": 5, **changes}
    return list(generate_rows(target, drafter or Drafts(tiny_head(), folder), PROMPTS, folder, **settings))


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("best", [0, 1, 2, 3])
def test_the_fastest_drafts_and_the_manifest_says_how_fast_all_were(target, tmp_path, monkeypatch, best):
    clocked(monkeypatch, SPEEDS | {best: 70})
    rows, fixed = made(target, tmp_path / "out"), HeadDrafter(tiny_head(), best) if best else None
    expected = list(generate_rows(target, fixed, PROMPTS, tmp_path / "fixed", max_new_tokens=12, batch_size=2, seed=5))
    assert rows == expected
    manifest, usual = manifest_of(tmp_path / "out"), manifest_of(tmp_path / "fixed")
    names = ["no draft", "1 token", "2 tokens", "3 tokens"]
    assert manifest["choice"]["tokens_per_second"] == dict(zip(names, (SPEEDS | {best: 70}).values(), strict=True))
    assert manifest["choice"]["seconds"] > 0
    assert manifest["drafter"] == identity(fixed) == usual["drafter"]
    assert manifest.keys() - usual.keys() == {"choice"}
    speeds = manifest["tokens_per_second"]
    assert (speeds["speculative"] is None, speeds["plain"] is None) == (not best, False)


def test_refused_drafts_need_drafts(target, tmp_path, monkeypatch):
    clocked(monkeypatch, {0: 900, 1: 40, 2: 30, 3: 20})
    rows = made(target, tmp_path, keep_refused=True)
    assert all("refused" in row for row in rows)
    assert manifest_of(tmp_path)["choice"]["tokens_per_second"].keys() == {"1 token", "2 tokens", "3 tokens"}
    assert manifest_of(tmp_path)["drafter"].startswith("head, 1 tokens")


class Cut(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(("first", "then"), [(0, 3), (3, 0), (2, 1)])
@pytest.mark.parametrize("after", [0, 2])
def test_what_goes_on_after_a_kill_drafts_as_it_began(target, tmp_path, monkeypatch, first, then, after):
    """After two pieces, or before any is written."""
    clocked(monkeypatch, {**SPEEDS, first: 99})
    expected = made(target, tmp_path / "whole")
    write, left = batches.Batches.write, iter(range(9))

    def killed(*args, **kwargs):
        if next(left) == after:
            raise Cut
        write(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(batches.Batches, "write", killed)
        with pytest.raises(Cut):
            made(target, tmp_path / "cut")
    with monkeypatch.context() as patch:
        clocked(patch, None)
        assert made(target, tmp_path / "cut") == expected
        patch.setattr(Engine, "step", None)  # of a finished folder nothing is decoded
        assert made(target, tmp_path / "cut") == expected
    whole, cut = manifest_of(tmp_path / "whole")["choice"], manifest_of(tmp_path / "cut")["choice"]
    assert whole["tokens_per_second"] == cut["tokens_per_second"]
    clocked(monkeypatch, {**SPEEDS, then: 99})
    assert made(target, tmp_path / "other") != expected, "another choice would not be seen"


def test_a_folder_of_something_else_is_refused_before_anything_is_clocked(target, tmp_path, monkeypatch):
    clocked(monkeypatch, SPEEDS)
    made(target, tmp_path / "out")
    clocked(monkeypatch, None)
    with pytest.raises(UserError, match="seed 5, not 6"):
        made(target, tmp_path / "out", seed=6)
    with pytest.raises(UserError, match=r"drafter .*2 tokens.* which is none of the head"):
        made(target, tmp_path / "out", Drafts(tiny_head(vocab_size=31), tmp_path))
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        made(target, tmp_path)


def test_of_few_rows_nothing_is_clocked(target, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_SHARE", 0.05)
    clocked(monkeypatch, None)
    made(target, tmp_path)
    assert manifest_of(tmp_path)["drafter"].startswith("head, 1 tokens")
    assert "choice" not in manifest_of(tmp_path)


def test_choosing_decodes_a_twentieth_at_most(target, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_SHARE", 0.05)
    clock, counts = choice._clock, []

    def counted(*args):
        counts.append(clock(*args)[0])
        return counts[-1], 1.0

    monkeypatch.setattr(choice, "_clock", counted)
    requests = [([1 + row % 30], Sampling(1.0, seed=row)) for row in range(1700)]
    how = {"batch_size": 4, "plain": True, "max_new_tokens": 12, "capacity": 16}
    assert choose(Drafts(tiny_head(), tmp_path), target, tmp_path, requests, range(16), **how).clocked
    assert len(counts) == 4 * (1 + 2)
    assert 0 < sum(counts) <= 0.05 * 1700 * 12
    assert max(counts) <= 16 * 11, "of the sample alone"


@pytest.mark.parametrize("architecture", ["mlp", "eagle3"])
def test_real_clocks_see_who_is_slow(tmp_path, monkeypatch, architecture):
    """A head that takes its time is not drafted with; where passes of the target take theirs, it is. A tuned tree is
    among the candidates, and what is made is what the chosen one makes without ever having been clocked."""
    target, head = Target(tiny_model(), None), tiny_head(architecture=architecture)
    write_tuned(tmp_path, [{"temperature": 1.0, "tree": TREE}], batch_size=2)
    propose, extend = HeadDrafter.propose, Target.extend

    tried = set()

    def slow_head(drafter, *args):
        tried.add(drafter.nodes)
        time.sleep(0.008 * drafter.nodes)
        return propose(drafter, *args)

    def slow_target(*args):
        time.sleep(0.025)
        return extend(*args)

    for slow, drafted in ((("propose", HeadDrafter, slow_head), False), (("extend", Target, slow_target), True)):
        name, owner, pace = slow
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pace)
            patch.setattr(choice, "_TOKENS", 12)
            patch.setattr(choice, "_ENOUGH", 0)
            rows = made(target, tmp_path / name, Drafts(head, tmp_path), max_new_tokens=16)
        manifest = manifest_of(tmp_path / name)
        speeds = manifest["choice"]["tokens_per_second"]
        assert list(speeds) == ["1 token", "2 tokens", "3 tokens", "a tree of 4 tokens, 2 deep", "no draft"]
        assert bool(manifest["drafter"]) == drafted, speeds
        best = max(speeds, key=speeds.get)
        shape = {"n": None, "a": FixedTree(TREE)}.get(best[0]) if best[0] in "na" else int(best[0])
        fixed = HeadDrafter(head, shape) if shape else None
        assert manifest["drafter"] == identity(fixed)
        again = generate_rows(
            target, fixed, PROMPTS, tmp_path / "again" / name, max_new_tokens=16, batch_size=2, seed=5
        )
        assert rows == list(again)
    assert tried == {1, 2, 3, 4}


def test_a_tuned_tree_is_gone_on_with_whatever_is_tuned_meanwhile(target, tmp_path, monkeypatch):
    clocked(monkeypatch, {**SPEEDS, 4: 99})
    write_tuned(tmp_path, [{"temperature": 1.0, "tree": TREE}], batch_size=2)
    rows = made(target, tmp_path / "out", Drafts(tiny_head(), tmp_path))
    clocked(monkeypatch, None)
    assert made(target, tmp_path / "out", Drafts(tiny_head(), tmp_path)) == rows
    write_tuned(tmp_path, [{"temperature": 1.0, "tree": [[0], [1], [0, 0], [0, 1]]}], batch_size=2)
    assert made(target, tmp_path / "out", Drafts(tiny_head(), tmp_path)) == rows
    other = tiny_head()
    next(other.parameters()).data += 1
    with pytest.raises(UserError, match=r"was made with drafter .* which is none of the head"):
        made(target, tmp_path / "out", Drafts(other, tmp_path))


def test_processes_take_the_choice_of_the_first(tmp_path, monkeypatch):
    own, together = threading.local(), threading.Barrier(2, timeout=60)
    monkeypatch.setattr(batches, "state", lambda: own.state)

    def clock(engine, requests, most, how):
        assert own.state.process_index == 0, "the second process has a clock of its own"
        time.sleep(0.02)
        return {**SPEEDS, 3: 99}[engine.drafter.nodes if engine.drafter else 0], 1.0

    monkeypatch.setattr(choice, "_clock", clock)
    rows, errors, drafts = {}, [], Drafts(tiny_head(), tmp_path)
    targets = [Target(tiny_model(), None) for _ in range(2)]

    def process(index, count, folder):
        wait = together.wait if count > 1 else lambda: None
        own.state = SimpleNamespace(
            process_index=index, num_processes=count, is_main_process=index == 0, wait_for_everyone=wait
        )
        try:
            rows[index, count] = made(targets[index], folder, drafts)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=process, args=(index, 2, tmp_path / "two"), daemon=True) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    process(0, 1, tmp_path / "one")
    assert not errors
    assert rows[0, 2] == rows[1, 2] == rows[0, 1]
    assert manifest_of(tmp_path / "two")["drafter"].startswith("head, 3 tokens")


def test_a_slow_process_still_finds_what_the_last_pass_left(tmp_path, monkeypatch):
    """The first of two is done with the chats while the second has yet to look for the answers."""
    own, together = threading.local(), threading.Barrier(2, timeout=20)
    targets = [chatty(tiny_llama()) for _ in range(2)]  # one after the other: both are seeded
    monkeypatch.setattr(batches, "state", lambda: own.state)
    wait = batches._wait_for

    def slowly(file):
        if own.state.process_index and "answers" in str(file):
            time.sleep(1)
        wait(file)

    monkeypatch.setattr(batches, "_wait_for", slowly)
    rows = {}

    def process(index):
        own.state = SimpleNamespace(
            process_index=index, num_processes=2, is_main_process=index == 0, wait_for_everyone=together.wait
        )
        sizes = {"rows": 12, "max_prompt_tokens": 24, "max_new_tokens": 12, "batch_size": 2, "progress": False}
        rows[index] = list(self_rows(targets[index], None, tmp_path / "out", **sizes))

    threads = [threading.Thread(target=process, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rows[0] == rows[1]
    assert not (tmp_path / "out" / "batches").exists()


def test_processes_that_hold_a_target_together_take_the_choice_of_their_first(target, tmp_path, monkeypatch):
    clocked(monkeypatch, SPEEDS)
    theirs = {"tokens_per_second": {"no draft": 1.0, "1 token": 2.0, "2 tokens": 1.0, "3 tokens": 3.0}, "seconds": 1.0}
    shape = {"num_speculative_tokens": 3}
    monkeypatch.setattr(target, "broadcast_object", lambda said: theirs if said and "seconds" in said else said)
    made(target, tmp_path)
    assert manifest_of(tmp_path)["drafter"].startswith("head, 3 tokens")
    assert manifest_of(tmp_path)["choice"] == {**theirs, "shape": shape}


def test_each_pass_of_the_targets_own_chats_chooses_for_itself(tmp_path, monkeypatch, capsys):
    target = chatty(tiny_llama())
    head = tiny_head(vocab_size=target.vocab_size)
    fast = {24: 0, 12: 2}

    def clock(engine, requests, most, how):
        nodes = engine.drafter.nodes if engine.drafter else 0
        return 50 + 20 * (nodes == fast[how["max_new_tokens"]]), 1.0

    monkeypatch.setattr(choice, "_clock", clock)
    sizes = {"rows": 60, "max_prompt_tokens": 24, "max_new_tokens": 12, "batch_size": 8}
    rows = list(self_rows(target, Drafts(head, tmp_path), tmp_path / "out", **sizes))
    said = capsys.readouterr().err
    assert "prompts: no draft is the fastest here (tokens/s: 1 token 50.0," in said
    assert "answers: 2 tokens is the fastest here" in said
    manifest = manifest_of(tmp_path / "out")
    prompts, answers = manifest["passes"]
    assert prompts["drafter"] is None
    assert answers["drafter"].startswith("head, 2 tokens")
    assert prompts["choice"]["tokens_per_second"]["no draft"] == 70
    clocks = answers["tokens_per_second"]
    plain = prompts["seconds"] + answers["seconds"] * clocks["speculative"] / clocks["plain"]
    assert manifest["plain_seconds"] == pytest.approx(plain)
    took = [each["seconds"] + each["choice"]["seconds"] for each in (prompts, answers)]
    assert manifest["seconds"] == pytest.approx(sum(took))
    monkeypatch.setattr(Engine, "step", None)
    assert list(self_rows(target, Drafts(head, tmp_path), tmp_path / "out", **sizes)) == rows


def test_a_draft_length_that_is_given_is_not_questioned(target_folder, text_file, tmp_path, monkeypatch):
    tiny_head(vocab_size=300).save_pretrained(tmp_path / "head")
    clocked(monkeypatch, {**SPEEDS, 0: 99})
    flags = ["--target", str(target_folder), "--sources", str(text_file), "--speculator", str(tmp_path / "head")]
    flags += ["--max_rows", "5", "--prompt_tokens", "8", "--max_new_tokens", "4", "--batch_size", "2"]
    for given, who in (([], None), (["--num_speculative_tokens", "2"], "head, 2 tokens")):
        out = tmp_path / f"out{len(given)}"
        assert main(["generate", *flags, "--output", str(out), *given]) == 0
        named = manifest_of(out)["drafter"]
        assert named is None if who is None else named.startswith(who)
        assert ("choice" in manifest_of(out)) == (who is None)
        clocked(monkeypatch, None)
