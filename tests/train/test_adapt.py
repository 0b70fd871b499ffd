"""`python -m speculator adapt`: rounds of training, gate and swap. `tests/soak` has one with the real commands."""

import gzip
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import DFLASH2, exit_code, tiny_block_head, tiny_head, write_tuning
from kills import Killed
from serving_here import chat_target, drafter, serving, tiny_head_for

from data.readers import read
from speculator.__main__ import build_parser, main
from speculator.cli import model_flags, serve
from speculator.clients.vllm_updates import MeasuredLength, VLLMServer
from speculator.errors import UserError
from speculator.report import Gate, HeadsCompared, Interval, write_record
from train import adapt

__all__ = ["chat_target", "drafter"]
KEY = "secret"
LEAST_ANSWERS = adapt._LEAST_ANSWERS


def record_shard(record, number: int, rows: int = 2, first: int | None = None) -> None:
    """Write a file of equal answers, or of different ones from the token `first` on."""
    (record / "rows").mkdir(parents=True, exist_ok=True)
    (record / "manifest.json").write_text(json.dumps({"recorded": True, "target": "tiny"}))
    starts = [5] * rows if first is None else range(first, first + rows)
    lines = [json.dumps({"input_ids": [start, 6, 7], "loss_mask": [0, 1, 1]}) + "\n" for start in starts]
    (record / "rows" / f"{number:08d}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))


class Loop:
    """A server, a folder of answers, and stand-ins for training and gate."""

    def __init__(self, target, folder, url, worker):
        self.folder, self.record, self.url, self.worker = folder, folder / "traffic", url, worker
        self.target, self.verdicts, self.calls, self.damaged, self.cached = target, [], [], False, []
        tiny_head_for(target).float().save_pretrained(folder / "head")
        record_shard(self.record, 0)

    def argv(self, *flags: str) -> list[str]:
        argv = ["adapt", "--server", self.url, "--record", str(self.record), "--speculator", str(self.folder / "head")]
        return [*argv, "--api_key", KEY, "--output", str(self.folder / "out"), "--every_tokens", "4", *flags]

    def call(self, argv, lock, accepted=(0,), **variables) -> None:
        argv = [str(word) for word in argv]
        value = lambda flag: argv[argv.index(flag) + 1]  # noqa: E731
        if "export" in argv:
            self.calls.append(("export", value("--speculator")))
            Path(value("--output")).mkdir(parents=True)
        elif "gate" in argv:
            self.calls.append(("gate", argv[4]))
            self.gated = argv[6 : argv.index("--suite")]
            self.guarded = value("--guard_head") if "--guard_head" in argv else None
            suite = HeadsCompared("s", 9, [10.0, 12.0], Interval(2.0, 1.0, 3.0), [2.0, 2.5])
            write_record(Path(value("--output")), Gate(suite, None, self.verdicts.pop(0), "<faster>"))
        else:
            self.calls.append(("train", value("--speculator.warm_start")))
            made, cache = Path(value("--output_dir")) / "speculator", Path(variables["SPECULATOR_CACHE"])
            self.cached.append(sorted(path.name for path in cache.glob("*")))
            for name in ("self-chats", "rows"):
                (cache / name).mkdir(parents=True, exist_ok=True)
            (cache / "rows.lock").touch()
            made.mkdir(parents=True, exist_ok=True)
            (made.parent / "config.yaml").touch()
            tiny_head_for(self.target).float().save_pretrained(made)
            if self.damaged:
                (made / "model.safetensors").write_bytes(b"damaged")

    def round(self, number: int) -> dict:
        return json.loads((self.folder / "out" / f"round-{number:03d}" / "round.json").read_text())


@pytest.fixture
def loop(chat_target, drafter, tmp_path, monkeypatch):
    arguments = build_parser("serve").parse_args(["--target", "tiny", "--num_speculative_tokens", "3"])
    make_drafter = partial(model_flags.drafter, target=chat_target, temperatures=[0.0, 1.0])
    load = partial(serve._load, arguments, chat_target, make_drafter)
    with serving(chat_target, drafter, load_drafter=load, api_key=KEY) as (url, worker):
        made = Loop(chat_target, tmp_path, url, worker)
        monkeypatch.setattr(adapt, "_call", made.call)
        monkeypatch.setattr(adapt, "_POLL_SECONDS", 0.01)
        monkeypatch.setattr(adapt, "_LEAST_ANSWERS", 1)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        yield made


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gate_flags", "--suit x"], "--suit"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--config", "speculator: {initialise: target}"], "speculator.warm_start and speculator.initialise"),
        (["--config", "speculator: {n_predict: 99}"], "n_predict"),
        (["--mix", "self"], "weight"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_typing_error_is_found_before_the_first_round(loop, flags, message, capsys):
    if "{" in flags[1]:
        (loop.folder / "own.yaml").write_text(flags[1])
        flags = ["--config", str(loop.folder / "own.yaml")]
    assert exit_code(main, loop.argv("--rounds", "1", *flags)) == 2
    assert message in capsys.readouterr().err
    assert not loop.calls
    assert not (loop.folder / "out").exists()


def test_the_gate_loads_the_target_as_the_training_does_and_no_prompt_is_left(loop):
    config = loop.folder / "own.yaml"
    config.write_text("target: {revision: v2, dtype: float32, chat_template_kwargs: {thinking: false}}\n")
    loop.verdicts = [True]
    made = loop.folder / "out" / "round-001" / "run"
    for name in ("generated", "stage2"):
        (made / name).mkdir(parents=True)
    assert main(loop.argv("--rounds", "1", "--config", str(config))) == 0
    expected = ["--target", "tiny", "--revision", "v2", "--dtype", "float32"]
    assert loop.gated == [*expected, "--chat_template_kwargs", '{"thinking": false}']
    assert sorted(path.name for path in made.iterdir()) == ["config.yaml", "speculator"]


def test_each_round_starts_from_the_head_in_use_and_only_accepted_heads_are_loaded(loop, capsys):
    out, heads = loop.folder / "out", [loop.worker.engine.drafter.head]
    for number, verdict in enumerate([True, False, True, True]):
        loop.verdicts, loop.damaged = [verdict], number == 2
        record_shard(loop.record, number)
        assert main(loop.argv("--rounds", str(number + 1))) == 0
        heads.append(loop.worker.engine.drafter.head)
    assert [new is old for old, new in pairwise(heads)] == [False, True, True, False]
    first, fourth = (str(out / name / "run/speculator") for name in ("round-001", "round-004"))
    start = str(loop.folder / "head")
    assert loop.calls == [(name, head) for head in (start, first, first, first) for name in ("train", "gate")]
    outcomes = [loop.round(number)["outcome"] for number in (1, 2, 3, 4)]
    assert [outcomes[0], outcomes[1], outcomes[3]] == ["in use", "rejected", "in use"]
    kept = [(out / f"round-00{number}/run/speculator").exists() for number in (1, 2, 3, 4)]
    assert kept == [True, False, True, True], "only the rejected head is deleted"
    assert outcomes[2].startswith("not loaded")
    assert (out / "rounds.html").read_text().count("&lt;faster&gt;") == 4
    assert b"<svg" in (out / "rounds.svg").read_bytes()
    assert not list(out.glob("round-*/traffic")), "no answers outlive their round"
    assert main(loop.argv("--rounds", "4")) == 0, "nothing is left to do"
    assert str((out / "speculator").resolve()) == fourth
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("round ")]) == 4
    assert said[-1] == "4 rounds are done; --rounds 5 runs another"
    assert sum("are done" in line for line in said) == 1
    assert loop.guarded is None, "there is no guard"
    record_shard(loop.record, 4)
    loop.verdicts, loop.damaged = [False], False
    assert main(loop.argv("--rounds", "5", "--gate_flags", "--guard g")) == 0
    assert loop.guarded == start, "the guard compares with the first head, so that losses can't add up"


def test_a_vllm_server_gets_both_heads_and_may_take_the_old_one_back(loop, monkeypatch):
    tried, outcomes = [], ["swapped back: 1.9", None]
    tiny_head(architecture="eagle3").save_pretrained(loop.folder / "head")

    class Server:
        def __init__(self, url, key):
            assert (url, key) == (loop.url, KEY)

        def counters(self):
            return 0.0, 0.0

        def resume(self):
            tried.append("resume")

        def try_head(self, new, old, measured):
            assert Path(new).is_dir()
            assert Path(old).is_dir()
            tried.append((Path(new).name, Path(old).name))
            return outcomes.pop(0)

    monkeypatch.setattr(adapt, "VLLMServer", Server)
    loop.verdicts = [True, True]
    assert main(loop.argv("--layout", "eagle3", "--rounds", "1")) == 0
    record_shard(loop.record, 1)
    assert main(loop.argv("--layout", "eagle3", "--rounds", "2")) == 0
    assert tried == ["resume", ("new", "old")] * 2
    assert [loop.round(number)["outcome"] for number in (1, 2)] == ["swapped back: 1.9", "in use"]
    start, runs = str(loop.folder / "head"), loop.folder / "out"
    made = [str(runs / f"round-00{number}" / "run/speculator") for number in (1, 2)]
    assert [head for name, head in loop.calls if name == "export"] == [made[0], start, made[1], start]
    assert str((runs / "speculator").resolve()) == made[1]
    assert not list(runs.glob("round-*/exported"))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dflash", "dflash has no convolutions: use dflash2"),
        ("eagle3", "no eagle3 layout for a DSpark"),
    ],
)
def test_a_layout_that_cannot_store_the_head_is_refused_before_the_first_round(
    target, tmp_path, capsys, layout, message
):
    tiny_block_head(target, **DFLASH2).save_pretrained(tmp_path / "head")
    flags = [
        "--speculator",
        str(tmp_path / "head"),
        "--record",
        str(tmp_path),
        "--target",
        "T",
        "--server",
        "http://nowhere",
    ]
    assert exit_code(main, ["adapt", *flags, "--output", str(tmp_path / "out"), "--layout", layout]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


MOMENTS = ("_copy_shards", "train", "_ask", "write_record", "write_page")


@pytest.mark.parametrize(
    ("moment", "after"),
    [
        *((moment, False) for moment in MOMENTS),
        # Little happens between the end of one of these and the beginning of the next.
        *(pytest.param(moment, True, marks=pytest.mark.soak) for moment in MOMENTS[:-1]),
        ("write_page", True),
    ],
)
def test_a_round_that_was_killed_is_resumed(loop, monkeypatch, moment, after):
    loop.verdicts, killed = [True], []

    def dying(function):
        def call(*arguments, **settings):
            due = moment != "_ask" or bool(arguments[2])
            if due and not killed and not after:
                killed.append(True)
                raise Killed
            function(*arguments, **settings)
            if due and not killed:
                killed.append(True)
                raise Killed

        return call

    name = "_call" if moment == "train" else moment
    with monkeypatch.context() as patched:
        patched.setattr(adapt, name, dying(getattr(adapt, name)))
        with pytest.raises(Killed):
            main(loop.argv("--rounds", "1"))
    record_shard(loop.record, 1)  # the server goes on
    old = loop.worker.engine.drafter.head
    assert main(loop.argv("--rounds", "1")) == 0
    assert loop.round(1)["outcome"] == "in use"
    begun = moment != "_copy_shards" or after
    assert loop.round(1)["newest"] == ("00000000.jsonl.gz" if begun else "00000001.jsonl.gz")
    assert (loop.worker.engine.drafter.head is old) == (moment == "write_page" or (moment == "write_record" and after))
    assert loop.verdicts == []


def test_both_heads_of_the_gate_draft_with_the_same_tuning(loop):
    """Timings of a second tuning, on a busy machine, would decide more than the weights."""
    write_tuning(loop.folder / "head")
    loop.verdicts = [True, True]
    assert main(loop.argv("--rounds", "1")) == 0
    record_shard(loop.record, 1)
    assert main(loop.argv("--rounds", "2")) == 0
    files = [loop.folder / "head", *(loop.folder / "out" / f"round-00{n}/run/speculator" for n in (1, 2))]
    assert len({(file / "decoding.json").read_text() for file in files}) == 1


def test_logs_of_chats_need_no_server(loop):
    logs = loop.folder / "logs"
    logs.mkdir()
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x" * 40}]}
    (logs / "monday.jsonl").write_text(f"{json.dumps(row)}\n")
    loop.verdicts = [True]
    argv = [
        "adapt",
        "--record",
        str(logs),
        "--speculator",
        str(loop.folder / "head"),
        "--target",
        "tiny",
        "--rounds",
        "1",
    ]
    assert exit_code(main, [*argv[:5], "--output", str(loop.folder / "none")]) == 2, "nothing names the target"
    assert main([*argv, "--every_tokens", "10", "--output", str(loop.folder / "out")]) == 0
    assert (loop.round(1)["outcome"], loop.round(1)["answer_tokens"]) == ("in use", 10)
    assert (loop.folder / "out/speculator").resolve().parts[-3:] == ("round-001", "run", "speculator")


def test_a_log_that_a_killed_writer_cut_and_that_grows_begins_rounds(loop, monkeypatch):
    logs, slept = loop.folder / "logs", []
    logs.mkdir()
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "ü" * 40}]}
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    (logs / "cut.jsonl").write_bytes(line + line[: line.index("ü".encode()) + 1])
    (logs / "grows.jsonl").write_bytes(line[:50])

    def sleep(_) -> None:
        slept.append(True)
        with (logs / "grows.jsonl").open("ab") as log:
            log.write(line[50:] + line if len(slept) == 1 else line)

    monkeypatch.setattr("time.sleep", sleep)
    loop.verdicts = [True, True]
    argv = ["adapt", "--record", str(logs), "--speculator", str(loop.folder / "head"), "--target", "tiny"]
    assert main([*argv, "--every_tokens", "30", "--output", str(loop.folder / "out"), "--rounds", "2"]) == 0
    assert len(slept) == 4
    assert [loop.round(number)["answer_tokens"] for number in (1, 2)] == [30, 60]


def test_reading_a_long_log_takes_a_tenth_of_the_time(tmp_path, monkeypatch):
    """A log of 10 GB that grows would otherwise be read whole, over and over."""
    now, slept, count = [0.0], [], adapt._answer_tokens

    def slow(shard):
        now[0] += 60
        return count(shard)

    def sleep(seconds) -> None:
        slept.append(seconds)
        record_shard(tmp_path, len(slept))

    record_shard(tmp_path, 0)
    monkeypatch.setattr(adapt, "_LEAST_ANSWERS", 1)
    monkeypatch.setattr(adapt, "_answer_tokens", slow)
    monkeypatch.setattr(adapt, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0], sleep=sleep))
    adapt._wait(SimpleNamespace(record=tmp_path, every_tokens=7, every_minutes=None), None)
    assert slept == [540]


def test_a_command_of_a_round_waits_for_no_other_processes(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with (tmp_path / "lock").open("w") as lock:
        adapt._call(["-c", "import os, sys; sys.exit('RANK' in os.environ or 'WORLD_SIZE' in os.environ)"], lock)


def test_a_log_that_cannot_be_read_is_named(loop, capsys):
    shard = loop.record / "rows" / "00000000.jsonl.gz"
    shard.write_bytes(shard.read_bytes()[:-12])
    assert main(loop.argv("--rounds", "1")) == 2
    assert str(shard) in capsys.readouterr().err


def test_answers_of_a_target_with_an_adapter_need_a_named_target(loop, capsys):
    (loop.record / "manifest.json").write_text('{"recorded": true, "target": "M --adapter A"}')
    assert exit_code(main, ["adapt", "--record", str(loop.record), "--speculator", str(loop.folder / "head")]) == 2
    assert "recorded with M --adapter A: give --target" in capsys.readouterr().err


def test_a_round_begins_after_enough_tokens_or_minutes(loop, monkeypatch, capsys):
    loop.verdicts, slept = [True, False], []

    def sleep(_) -> None:
        slept.append(True)
        record_shard(loop.record, len(slept), rows=1)

    monkeypatch.setattr("time.sleep", sleep)
    assert main(loop.argv("--rounds", "1", "--every_tokens", "7")) == 0
    assert "--every_minutes 0" in capsys.readouterr().err, "the way to end the wait"
    told = " ".join(build_parser("adapt").format_help().split())
    assert f"fewer tokens, of at least {LEAST_ANSWERS} answers" in told
    assert len(slept) == 2
    assert loop.round(1)["answer_tokens"] == 8
    assert main(loop.argv("--rounds", "2", "--every_tokens", "1000", "--every_minutes", "0")) == 0
    assert len(slept) == 3, "without a new answer nothing begins"
    assert loop.round(2)["newest"] == "00000003.jsonl.gz"


def test_a_training_that_is_refused_gets_the_newest_answers_the_next_time(loop, monkeypatch):
    def refuse(*_, **__):
        raise UserError("too few rows")

    with monkeypatch.context() as patched:
        patched.setattr(adapt, "_call", refuse)
        assert main(loop.argv("--rounds", "1")) == 2
    record_shard(loop.record, 1)
    loop.verdicts = [True]
    assert main(loop.argv("--rounds", "1")) == 0
    assert loop.round(1)["newest"] == "00000001.jsonl.gz"


def test_with_fewer_answers_too_few_would_be_held_out(tmp_path):
    for count in (LEAST_ANSWERS - 1, LEAST_ANSWERS):
        record_shard(tmp_path, 0, count, first=5)
        held = sum(row["split"] == "held-out" for row in read(str(tmp_path)))
        assert (held >= 64) is (count == LEAST_ANSWERS)


def test_a_round_waits_for_an_answer_to_hold_out_however_late_it_is(loop, monkeypatch, capsys):
    monkeypatch.setattr(adapt, "_LEAST_ANSWERS", LEAST_ANSWERS)
    record_shard(loop.record, 0, LEAST_ANSWERS - 1, first=5)
    loop.verdicts, slept = [True], []

    def sleep(_) -> None:
        slept.append(True)
        record_shard(loop.record, len(slept), rows=2, first=None if len(slept) == 1 else 400)

    monkeypatch.setattr("time.sleep", sleep)
    assert main(loop.argv("--rounds", "1", "--every_minutes", "0")) == 0
    assert len(slept) == 2, "copies count once"
    assert capsys.readouterr().err.count("waiting for 200 different answers") == 1


def test_the_chats_that_the_target_wrote_serve_all_rounds(loop):
    loop.verdicts = [True, False]
    assert main(loop.argv("--rounds", "1", "--mix", "self@0.25")) == 0
    record_shard(loop.record, 1)
    assert main(loop.argv("--rounds", "2", "--mix", "self@0.25")) == 0
    assert loop.cached == [[], ["self-chats"]]


def test_a_vllm_server_with_the_new_head_is_compared_with_the_old_heads_acceptance_after_a_kill(loop, monkeypatch):
    loaded, lengths = ["old"], {"old": 2.0, "new": 1.5}
    tiny_head(architecture="eagle3").save_pretrained(loop.folder / "head")

    class Server(VLLMServer):
        def counters(self):
            return 0, 0

        def resume(self):
            pass

        def _replace(self, folder):
            loaded.append(Path(folder).name)

        def watch(self, enough, least=0):
            if len(loaded) == 2:  # while it watches the new head
                loaded.append("new")
                raise Killed
            return MeasuredLength(lengths[loaded[-1]], 0.01)

    monkeypatch.setattr(adapt, "VLLMServer", Server)
    loop.verdicts = [True]
    with pytest.raises(Killed):
        main(loop.argv("--layout", "eagle3", "--rounds", "1"))
    assert main(loop.argv("--layout", "eagle3", "--rounds", "1")) == 0
    assert loop.round(1)["outcome"].startswith("swapped back")
    assert loaded[-1] == "old"


def test_answers_count_whole_after_the_newest_file_of_the_last_round_was_deleted(loop, monkeypatch):
    loop.verdicts = [True, True]
    assert main(loop.argv("--rounds", "1")) == 0
    record_shard(loop.record, 1)
    (loop.record / "rows" / "00000000.jsonl.gz").unlink()
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits for answers that are there"))
    assert main(loop.argv("--rounds", "2")) == 0


def test_flags_that_cannot_work_fail_in_one_line_before_any_training(loop, chat_target, capsys):
    with adapt._alone(loop.folder) as lock, serving(chat_target) as (without_route, _):
        wrong = [
            ["--output", str(loop.folder)],  # locked
            ["--api_key", "wrong"],
            ["--api_key", ""],
            ["--server", without_route],
            ["--server", "http://127.0.0.1:9"],
            ["--record", str(loop.folder / "nowhere")],
            ["--speculator", str(loop.record)],
            ["--every_tokens", "0"],
        ]
        for flags in wrong:
            assert exit_code(main, loop.argv(*flags)) == 2, flags
            assert capsys.readouterr().err.count("\n") == 1, flags
        assert lock
    loop.verdicts = [False]
    assert main(loop.argv("--rounds", "1")) == 0
    tiny_head_for(chat_target).float().save_pretrained(loop.folder / "other")
    in_use = (loop.folder / "out" / "speculator").resolve()
    assert exit_code(main, loop.argv("--speculator", str(loop.folder / "other"))) == 2
    assert f"out began with {loop.folder / 'head'}; choose another --output" in capsys.readouterr().err
    assert (loop.folder / "out" / "speculator").resolve() == in_use
    assert [name for name, _ in loop.calls] == ["train", "gate"]


def test_hidden_files_and_cards_are_no_logs(tmp_path):
    for name in ("._a.jsonl", "b.JSONL", "README.md", "dataset_info.json", "a.jsonl.gz", "more/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [file.name for file in adapt._shards(tmp_path)] == ["a.jsonl.gz", "b.JSONL"]
    assert adapt._shards(tmp_path / "not yet") == []
