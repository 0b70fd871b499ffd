"""What a run on chats decodes: what its users asked, as far as it fits, known before the folder is taken."""

import json
import re
import shutil

import pytest
from chat_templates import CHATML
from conftest import settled

from eval.suites import load_suite
from speculator.errors import UserError
from speculator.target.model import Target
from train.command_line import parse
from train.options.config import ROOT
from train.run import run as run_all
from train.text.inputs import own_prompts_of, prompts_of


@pytest.fixture(scope="module")
def chat_target(target_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(target_folder, folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def chats(path, long):
    """Chats of two turns; each tenth is too long for a context of 128."""
    rows = []
    for i in range(300):
        first = "word " * 60 if i % 10 == 0 or long else f"Q{i}?"
        asked = [("user", first), ("assistant", "A."), ("user", f"R{i}?"), ("assistant", f"B{i}.")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in asked]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(target, source, output, *flags):
    sizes = ["--eval.max_new_tokens", "8", "--stage2.generate.max_new_tokens", "8", "--eval.prompt_tokens", "8"]
    sizes += ["--stage2.generate.prompt_tokens", "8", "--data.seq_length", "96", "--report_to", "none"]
    named = [
        "--config",
        str(ROOT / "tests/plain.yaml"),
        "--target.name_or_path",
        str(target),
        "--data.sources",
        f"[{source}]",
        "--output_dir",
        str(output),
    ]
    return parse([*named, *sizes, *flags])


def test_prompts_of_a_run_are_those_of_a_suite_of_its_chats(chat_target, tmp_path, capsys):
    target, source = Target.load(str(chat_target)), chats(tmp_path / "chats.jsonl", long=False)
    config = config_of(chat_target, source, tmp_path / "run")
    run = settled(config, target)
    suite = prompts_of(run, target, run.mixture, "held-out", 99)
    assert "held-out): " in capsys.readouterr().err
    assert suite.chat
    assert suite.left_out > 0
    whole = load_suite(str(source), target, prompt_tokens=8, max_prompts=999, max_new_tokens=8)
    assert whole.left_out == 30
    assert len(suite.prompts) > 5
    assert all(prompt in whole.prompts for prompt in suite.prompts)
    assert all(target.tokenizer.decode(prompt).count("<|im_start|>assistant") == 2 for prompt in suite.prompts)
    own = own_prompts_of(run, target, run.mixture, length=96)
    error = capsys.readouterr().err
    skipped = int(re.search(r"\(train\): (\d+) prompts are skipped", error)[1])
    read, used = map(int, re.search(r"prompts of stage 2, .*: (\d+) rows read, (\d+) used, ", error).groups())
    assert read == used + skipped
    assert used == len(own) > 200
    assert all(target.tokenizer.decode(prompt.ids).count("<|im_start|>assistant") == 1 for prompt in own)


@pytest.mark.parametrize(
    ("long", "flags", "message"),
    [
        (True, [], "none of its .* prompts fits"),
        (
            False,
            ["--stage2.generate.max_rows", "500", "--stage2.per_device_train_batch_size", "300"],
            "2[0-9]{2} rows to train on in stage2",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_an_error_before_the_folder_is_created(
    chat_target, tmp_path, monkeypatch, long, flags, message
):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    source = chats(tmp_path / "chats.jsonl", long)
    with pytest.raises(UserError, match=message):
        run_all(config_of(chat_target, source, tmp_path / "run", *flags))
    assert not (tmp_path / "run").exists()


def test_stage_2_without_a_prompt_is_an_error(chat_target, tmp_path):
    target, source = Target.load(str(chat_target)), tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(40)))
    config = config_of(chat_target, source, tmp_path / "run", "--stage2.generate.prompt_tokens", "64")
    run = settled(config, target)
    message = "^stage2.generate: no document in the train split of .*texts.jsonl gives a prompt$"
    with pytest.raises(UserError, match=message):
        own_prompts_of(run, target, run.mixture, length=96)
