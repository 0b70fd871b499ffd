"""`train.py --data.sources '[self]'`: the target writes what the run reads, and nobody else need know."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from chat_targets import chatty, save, tiny_llama
from conftest import settled, shorten_validation
from datasets import Dataset, load_from_disk
from filelock import FileLock
from kills import killed_at
from safetensors.torch import load_file, save_file

from data.writers.engine import EngineWriter
from speculator.errors import UserError
from speculator.files import cache_folder
from speculator.target.fingerprint import digest_of_files
from speculator.target.model import Target
from speculator.target.remote.server_target import ServerTarget
from train.command_line import parse
from train.door.dry_run import run_on_stand_ins
from train.door.settle import settle
from train.options.config import ROOT
from train.run import run as run_all
from train.text import own_text
from train.text.inputs import rows
from train.text.own_text import folder_of, with_self_written

SIZES = {
    "data.seq_length": 16,
    "data.self_source.max_rows": 200,
    "data.self_source.max_prompt_tokens": 16,
    "data.self_source.max_new_tokens": 16,
    "data.self_source.batch_size": 32,
    "speculator.n_predict": 2,
    "stage2.max_steps": 0,
    "eval.validation_rows": 2,
    "eval.validation_prompts": 2,
    "eval.tune_prompts": 0,
    "eval.prompt_tokens": 8,
    "eval.max_prompts": 2,
    "eval.max_new_tokens": 8,
    "report_to": "none",
}
for _stage in ("stage1", "stage2"):
    SIZES |= {f"{_stage}.{name}": 2 for name in ("per_device_train_batch_size", "eval_steps", "save_steps")}
    SIZES |= {f"{_stage}.warmup_steps": 0, f"{_stage}.logging_steps": 1}
SIZES["stage1.max_steps"] = 2


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    return save(chatty(tiny_llama()), tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def target(chat_folder):
    return Target.load(str(chat_folder))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, figures_only):
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "cache"))
    shorten_validation(monkeypatch)


def config_of(chat_folder, output, **changes):
    named = {
        "config": ROOT / "tests/plain.yaml",
        "target.name_or_path": chat_folder,
        "data.sources": "[self]",
        "output_dir": output,
    }
    settings = {**named, **SIZES, **changes}
    return parse([word for key, value in settings.items() for word in (f"--{key}", str(value))])


def test_a_run_without_data_trains_on_text_that_its_target_writes(chat_folder, tmp_path, capsys):
    config = config_of(chat_folder, tmp_path / "run")
    run_all(config)
    record = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["settings"]
    assert record["data"]["sources"] == ["self"]
    assert "| training data | self |" in (tmp_path / "run" / "speculator" / "README.md").read_text()
    assert json.loads((tmp_path / "run" / "eval" / "report.json").read_text())["suites"]
    said = capsys.readouterr().err
    assert "writes 200 chats into" in said
    assert "of 200 prompts that the target wrote" in said
    (folder,) = [path for path in cache_folder().glob("self-*") if path.is_dir()]
    whole = (folder / "manifest.json").read_bytes()
    run_all(replace(config, output_dir=str(tmp_path / "other")))  # reads what is there
    assert (folder / "manifest.json").read_bytes() == whole


def test_self_mixes_with_other_sources_by_weight(chat_folder, target, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": f"{i} the quick brown fox " * 20}) + "\n" for i in range(200)))
    config = config_of(chat_folder, tmp_path / "run", **{"data.sources": f"[self@0.5, {other}@0.5]"})
    run = settled(config, target)
    packed = rows(run, target, with_self_written(run, target), 16, "train")
    own = sum("fox" not in target.tokenizer.decode(row["input_ids"]) for row in packed)
    assert 0.3 < own / len(packed) < 0.7


def test_each_setting_that_changes_the_chats_changes_their_folder(chat_folder, target, tmp_path):
    config = config_of(chat_folder, tmp_path / "run")
    others = [{"data.seed": 1}, {"data.self_source.max_rows": 99}, {"data.self_source.temperatures": "[0.0, 1.0]"}]
    folders = {
        folder_of(settled(config_of(chat_folder, tmp_path / "run", **other), target), target) for other in [{}, *others]
    }
    assert len(folders) == 4
    assert (
        folder_of(settled(config_of(chat_folder, tmp_path / "elsewhere", **{"data.seq_length": 8}), target), target)
        in folders
    )
    assert folder_of(settled(config, target), target) in folders
    again = settled(config_of(chat_folder, tmp_path / "run", seed=1), target)
    assert folder_of(again, target) == folder_of(settled(config, target), target), "heads of other seeds, the same text"
    assert again.own_writing.seed == again.self_writing.seed == 0
    tuned = Target(copy.deepcopy(target.model), target.tokenizer)
    tuned.model.model.layers[0].mlp.up_proj.weight.data *= 2  # which the fingerprint does not see
    assert tuned.fingerprint == target.fingerprint
    assert folder_of(settled(config, tuned), tuned) not in folders


def test_a_served_target_that_was_tuned_in_its_folder_is_another(chat_folder, tmp_path):
    folder = Path(shutil.copytree(chat_folder, tmp_path / "target"))
    found = []
    for _ in range(2):
        target = ServerTarget.connect(str(folder), ["http://nowhere"], device="cpu")
        run = settled(config_of(folder, tmp_path / "run"))
        found.append((target.fingerprint, folder_of(run, target), digest_of_files(f"{folder} --revision main")))
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"] *= 2
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (before, chats, digest), (after, others, other) = found
    assert before == after, "it reads the embedding and the output matrix alone"
    assert chats != others
    assert digest != other
    quantised = Target.load(str(folder))
    quantised.model.config.quantization_config = {"quant_method": "any"}
    assert quantised.digest == digest_of_files(str(folder))
    assert quantised.digest != other
    copied = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert quantised.digest == digest_of_files(str(copied)), "a copy is the same model"


def test_text_of_stage_2_is_packed_in_the_same_rows_each_time(chat_folder, tmp_path):
    run = settled(config_of(chat_folder, tmp_path, **{"data.seq_length": 64, "stage2.max_steps": 1}))
    texts = [{"input_ids": [i] * (9 + i % 40), "loss_mask": [0] * 5 + [1] * (4 + i % 40)} for i in range(100)]
    texts.append({"input_ids": [101] * 70, "loss_mask": [0] + [1] * 69})  # longer than rows of stage 1
    rows = own_text.packed(run, Dataset.from_list(texts), 64)
    again = own_text.packed(run, Dataset.from_list(texts), 64)
    assert list(rows) == list(again)
    sizes = list(map(len, rows["input_ids"]))
    assert max(sizes) == 70
    assert sum(sizes) == sum(len(text["input_ids"]) for text in texts) > 0.85 * 70 * len(rows)
    whole = [list(group) for row in rows["input_ids"] for _, group in groupby(row)]
    assert sorted(whole) == sorted(text["input_ids"] for text in texts)
    few = Dataset.from_list(texts[:3])  # two rows would be no more than a batch, but these make one
    assert own_text.packed(run, few, 64) is few


def test_the_checkpoint_of_stage_2_is_chosen_by_rows_that_the_target_wrote(chat_folder, tmp_path):
    run = settled(config_of(chat_folder, tmp_path, **{"stage2.max_steps": 1, "eval.validation_rows": 4}))
    rows = Dataset.from_list([{"input_ids": [i]} for i in range(100)])
    trained, held = own_text.held_out(run, rows)
    assert [row["input_ids"] for row in held] == [[24], [49], [74], [99]]
    assert sorted(row["input_ids"] for row in (*trained, *held)) == [[i] for i in range(100)]
    few, none = own_text.held_out(run, rows.select(range(19)))
    assert (len(few), none) == (19, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.self_source.temperatures": "[]"}, "data.self_source.temperatures"),
        ({"data.sources": "[self, self]"}, "data.sources names self twice"),
        (
            {"data.self_source.max_new_tokens": 200},
            "data.self_source.max_prompt_tokens + data.self_source.max_new_tokens is 216, but",
        ),
        ({"data.sources": "[self, nowhere.jsonl]"}, "no such source: nowhere.jsonl"),
        ({"data.sources": "[self, empty.jsonl]"}, "empty.jsonl holds nothing to train on"),
    ],
)
def test_wrong_input_is_known_before_the_target_writes(chat_folder, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    monkeypatch.setattr(own_text, "self_rows", lambda *_, **__: pytest.fail("the target writes"))
    with pytest.raises(UserError) as refusal:
        run_all(config_of(chat_folder, tmp_path / "run", **changes))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_a_second_launch_does_not_write_as_well(chat_folder, target, tmp_path):
    config = config_of(chat_folder, tmp_path / "run")
    folder = folder_of(settled(config, target), target)
    folder.parent.mkdir()
    with FileLock(f"{folder}.lock"), pytest.raises(UserError, match="another run is writing these chats"):
        with_self_written(settled(config, target), target)
    assert not folder.exists()


def test_a_dry_run_writes_nothing(chat_folder, tmp_path, capsys):
    run_on_stand_ins(settle(config_of(chat_folder, tmp_path / "run"), 1, local_only=True), run_all)
    assert "stage1 on stand-ins" in capsys.readouterr().out
    assert not cache_folder().exists()


def test_chats_resume_after_a_kill(chat_folder, target, tmp_path, monkeypatch):
    config = config_of(chat_folder, tmp_path / "run")
    whole = list(load_from_disk(str(Path(with_self_written(settled(config, target), target).locations[0]) / "rows")))
    monkeypatch.setenv("SPECULATOR_CACHE", str(tmp_path / "again"))
    with killed_at(EngineWriter, "write", call=1):
        with_self_written(settled(config, target), target)
    made, write = [], EngineWriter.write
    monkeypatch.setattr(EngineWriter, "write", lambda *a, **how: made.append(how["title"]) or write(*a, **how))
    assert not (folder_of(settled(config, target), target) / "manifest.json").exists()
    assert (
        list(load_from_disk(str(Path(with_self_written(settled(config, target), target).locations[0]) / "rows")))
        == whole
    )
    assert made == ["prompts", "answers"]


def test_stage_2_writes_fresh_chats_with_the_head_of_stage_1(chat_folder, target, tmp_path):
    changes = {"stage2.max_steps": 2, "stage2.generate.max_rows": 60, "stage2.generate.max_new_tokens": 16}
    changes |= {"stage2.generate.num_speculative_tokens": 2}
    config = config_of(chat_folder, tmp_path / "run", **changes)
    run_all(config)
    manifest = json.loads((tmp_path / "run" / "generated" / "manifest.json").read_text())
    assert "2 tokens" in manifest["drafter"]
    second = load_from_disk(str(tmp_path / "run" / "generated" / "rows"))
    asked = [
        {tuple(row["input_ids"][: row["loss_mask"].index(1)]) for row in rows}
        for rows in (load_from_disk(str(folder_of(settled(config, target), target) / "rows")), second)
    ]
    assert not asked[0] & asked[1]


def test_stage_2_drafts_adaptively_unless_a_length_is_given(chat_folder, target, tmp_path, monkeypatch):
    drafters = []
    monkeypatch.setattr("data.writers.load_drafter", lambda **how: drafters.append(how))
    monkeypatch.setattr(own_text, "self_rows", lambda *_, **__: None)
    monkeypatch.setattr(own_text, "summary", lambda folder: "")
    for length in (0, 2):
        config = config_of(chat_folder, tmp_path / "run", **{"stage2.generate.num_speculative_tokens": length})
        own_text.generate_own_text(settled(config), target, tmp_path / "head", None, 16)
    assert drafters[0]["batch_size"] == config.stage2.generate.batch_size
    assert [drafter["num_speculative_tokens"] for drafter in drafters] == [0, 2]


def test_too_few_fresh_chats_for_a_batch_fails_in_one_line(chat_folder, tmp_path):
    sizes = {"stage2.generate.max_rows": 60, "stage2.generate.max_new_tokens": 16}
    changes = {"stage2.max_steps": 2, **sizes, "stage2.per_device_train_batch_size": 60}
    with pytest.raises(UserError, match="rows to train on in stage2 are less than one batch of 60"):
        run_all(config_of(chat_folder, tmp_path / "run", **changes))
