"""Every command reads rows with odd values without a traceback, and says of each row that it is used, or why not."""

import argparse
import json
from importlib import import_module

import pytest
from conftest import save_tiny, tiny_head, tiny_tokenizer
from odd_rows import CALLS, GOOD, said_of_rows, with_odd_values, write

from data.tally import Tally
from speculator.__main__ import COMMANDS, build_parser, run
from speculator.errors import UserError
from speculator.target.model import Target
from train.command_line import parse
from train.door.plan import Plan
from train.door.settle import settle
from train.options.config import ROOT
from train.text.inputs import load_target, read_inputs

KINDS = [None, 7, "text", ["a"], {"a": 1}]
ROWS = [*KINDS, *with_odd_values(GOOD, KINDS)]
SUITE = ["--speculator", "HEAD", "--suite", "ROWS", "--max_prompts", "9999", "--prompt_tokens", "4"]
SUITE += ["--max_new_tokens", "4"]
SOURCE = ["--sources", "ROWS", "--max_bad_rows", "1", "--output", "OUT"]
READERS = {
    # flags, the function that works with what has been read, if that takes long
    "data prepare": ([*SOURCE, "--seq_length", "32", "--num_proc", "1"], None),
    "data view": (["ROWS", "--rows", "9999"], None),
    "data generate": ([*SOURCE, *SUITE[-4:]], "data.writers.engine.EngineWriter.write"),
    "eval": ([*SUITE, "--output", "OUT"], "eval.run.evaluate"),
    "eval gate": (["HEAD", "HEAD", *SUITE[2:]], "eval.gate.compare"),
    "eval tune": ([*SUITE, "--output", "OUT"], "eval.tune.write_tuning"),
    "eval lossless": (SUITE, "eval.lossless._fit"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a target that has a chat template, a head, rows with odd values, and good rows."""
    folder = tmp_path_factory.mktemp("border")
    config = save_tiny("llama", folder / "TARGET") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CALLS
    tokenizer.save_pretrained(folder / "TARGET")
    tiny_head(vocab_size=300).save_pretrained(folder / "HEAD")
    write(folder / "rows.jsonl", ROWS)
    write(
        folder / "prompts.jsonl",
        [{"prompt": "def f(x):"}, {"messages": [{"role": "user", "content": "Why?"}]}, {"turns": ["Why?", "How?"]}],
    )
    return folder


@pytest.fixture
def kinds(monkeypatch, tmp_path):
    """What was wrong with the bad rows that were counted."""
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    found, add = [], Tally.add
    monkeypatch.setattr(Tally, "add", lambda tally, error: found.append(error.kind) or add(tally, error))
    return found


def begin(*_, **__):
    raise UserError("all is read")


def command(folder, tmp_path, name, flags):
    paths = {"ROWS": folder / "rows.jsonl", "HEAD": folder / "HEAD", "OUT": tmp_path / "out"}
    return run(name, [*(str(paths.get(flag, flag)) for flag in flags), "--target", str(folder / "TARGET")])


@pytest.mark.parametrize("name", READERS)
def test_every_command_accounts_for_rows_with_odd_values(folder, tmp_path, monkeypatch, capfd, kinds, name):
    flags, work = READERS[name]
    if work:
        monkeypatch.setattr(work, begin)
    code, error = command(folder, tmp_path, name, flags), capfd.readouterr().err
    assert (code, "all is read" in error) == ((2, True) if work else (0, False)), error
    said = said_of_rows(error).values()
    assert all(read == used + left_out and used for read, used, left_out in said)
    read = sum(row[0] for row in said)
    assert 0.8 * len(ROWS) < read <= len(ROWS) if name == "data generate" else read == len(ROWS) > 400
    assert not [kind for kind in kinds if kind.startswith("can't be read")], "no type that nobody foresaw"


def test_a_training_run_accounts_once_for_its_rows_and_for_its_prompts(folder, tmp_path, capfd, kinds):
    sizes = ["--eval.prompt_tokens", "4", "--stage2.generate.prompt_tokens", "4", "--eval.max_new_tokens", "8"]
    sizes += ["--stage2.generate.max_new_tokens", "8", "--data.seq_length", "96", "--data.max_bad_rows", "1"]
    named = ["--target.name_or_path", str(folder / "TARGET"), "--data.sources", f"[{folder / 'rows.jsonl'}]"]
    named += ["--output_dir", str(tmp_path / "run"), "--report_to", "none", "--data.num_proc", "1"]
    settled = settle(parse(["--config", str(ROOT / "tests" / "plain.yaml"), *named, *sizes]), processes=1)
    inputs = read_inputs(Plan(settled), load_target(settled))
    said = said_of_rows(capfd.readouterr().err)
    assert all(read == used + left_out and used for read, used, left_out in said.values())
    train, *others = (f"the {split} split of {settled.mixture}" for split in ("train", "validation", "held-out"))
    prompts = [f"prompts of {each}" for each in others]
    assert said.keys() == {train, others[0], *prompts, f"prompts of stage 2, {train}"}
    assert [said[name][1] for name in prompts] == [len(suite.prompts) for suite in inputs.suites.values()]
    assert not [kind for kind in kinds if kind.startswith("can't be read")], "no type that nobody foresaw"


@pytest.mark.parametrize("name", ["generate", "data generate"])
def test_rows_of_prompts_are_all_used_or_one_is_an_error_in_one_line(folder, tmp_path, monkeypatch, capfd, name):
    sizes = ["--max_new_tokens", "2", "--output", str(tmp_path / "out")]
    flags = ["--target", str(folder / "TARGET"), "--prompts", str(folder / "prompts.jsonl"), *sizes]
    assert run(name, flags) == 0
    error = capfd.readouterr().err
    assert said_of_rows(error) == {f"--prompts {folder / 'prompts.jsonl'}": (3, 3, 0)}
    assert ("first turns only, 1 later turns are not asked" in error) == (name == "generate")

    target = Target.load(str(folder / "TARGET"))
    monkeypatch.setattr("speculator.cli.model_flags.load_target", lambda arguments: target)
    monkeypatch.setattr("speculator.cli.generate.check_prompts", begin)
    monkeypatch.setattr("data.writers.engine.EngineWriter.write", begin)
    arguments = vars(build_parser(name).parse_args([*flags[:2], "--prompts", str(tmp_path / "row.jsonl"), *sizes]))
    arguments["output"] = tmp_path / "another"
    work, faults = import_module(COMMANDS[name]).run, []
    asked = {"messages": GOOD[0]["messages"][:-1]}  # without the answer
    prompts = [{**row, **asked} if "tools" in row else row for row in GOOD if row.keys() & {"tools", "completion"}]
    for row in [*KINDS, *with_odd_values(prompts, KINDS)]:
        write(tmp_path / "row.jsonl", [row])
        with pytest.raises(UserError) as error:
            work(argparse.Namespace(**arguments))
        faults.append(str(error.value))
    assert 50 < faults.count("all is read") < len(faults) - 50
    assert not [fault for fault in faults if "\n" in fault]
