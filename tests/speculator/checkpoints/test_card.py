"""The model card says what the folder and its run say, and nothing that these do not."""

import copy
import json

import pytest
import yaml
from conftest import tiny_head
from huggingface_hub import ModelCard

from speculator import UserError
from speculator.__main__ import main
from speculator.checkpoints.card import write_card

SETTINGS = {
    "data": {"seq_length": 128},
    "loss": {"cross_entropy": 0.0, "kl": 1.0},
    "stage1": {
        "max_steps": 300,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 0.001,
        "lr_scheduler_type": "cosine",
    },
}
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0"}


def row(drafter: str, **changes) -> dict:
    made = {
        "name": "chat",
        "prompts": 7,
        "temperature": 0.0,
        "drafter": drafter,
        "acceptance_length": 2.25,
        "acceptance_by_position": [0.75, 0.5],
        "tokens_per_second": {"speculative": 61.5, "plain": 41.0, "hf_generate": 30.0},
    }
    if drafter != "none":
        ratio = {"value": 1.5, "low": 1.25, "high": 1.75}
        made["speedup"] = {"plain": ratio, "hf_generate": {**ratio, "value": 2.05}}
    return {**made, **changes}


REPORT = {
    "hardware": "GPU of the test",
    "versions": {"torch": "2.13.0", "python": "3.11"},
    "settings": {"batch_size": 1, "dtype": "bfloat16"},
    "suites": [
        row("none", acceptance_length=1.0),
        row("head", identical_to_greedy={"identical": 6, "of": 7, "dtype": "float32"}),
        row("ngram", acceptance_length=1.5),
    ],
}


def head_folder(folder, **recorded):
    head = tiny_head()
    for name, value in recorded.items():
        setattr(head.config, name, value)
    head.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    """A run's folder, as train.py leaves it."""
    sources = ["org/chats", "python-sources", "/home/somebody/private/notes.jsonl", "data/local.jsonl"]
    folder = head_folder(tmp_path / "run" / "speculator", base_model_name_or_path="org/base", training_data=sources)
    record = {"settings": SETTINGS, "versions": VERSIONS, "git_commit": "abc123", "processes": 4}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(record))
    (tmp_path / "run" / "eval").mkdir()
    (tmp_path / "run" / "eval" / "report.json").write_text(json.dumps(REPORT))
    return folder


def test_front_matter_is_what_the_hub_reads(run):
    data = ModelCard.load(write_card(run)).data.to_dict()
    assert data == {
        "base_model": "org/base",
        "datasets": ["org/chats"],
        "library_name": "speculator",
        "tags": ["speculative-decoding", "mlp-speculator"],
    }


def test_hub_data_sets_are_named_without_config_split_and_weight(tmp_path):
    sources = ["org/chats:train_sft@0.85", "org/all/one-part:train@.15", "org/chats", "notes/mine.jsonl@0.5"]
    data = ModelCard.load(write_card(head_folder(tmp_path, training_data=sources))).data.to_dict()
    assert data["datasets"] == ["org/chats", "org/all"]


def test_a_folder_here_is_no_data_set_of_the_hub(run, tmp_path, monkeypatch):
    (tmp_path / "org" / "chats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "datasets" not in ModelCard.load(write_card(run)).data.to_dict()


def test_tells_the_recipe_and_the_tokens_of_all_processes(run):
    text = write_card(run).read_text()
    assert "| stage1 | 300 | 24 of 128 tokens | 921,600 | 0.001, cosine |" in text
    assert "Loss: kl 1." in text
    parameters = sum(weight.numel() for weight in tiny_head().parameters())
    assert f"| parameters | {parameters:,}, float32 |" in text
    assert "torch 2.13.0, transformers 5.23.0, python 3.11, commit abc123" in text


def test_tells_every_decoder_and_baseline_with_machine_and_settings(run):
    text = write_card(run).read_text()
    assert "On GPU of the test; batch size 1, dtype bfloat16." in text
    assert "speedup over plain decoding | speedup over transformers generate |" in text
    assert "| 7 of chat | 0 | plain decoding | 1.00 |  | 41.0 |  |  |" in text
    ratios = "1.50 (1.25-1.75) | 2.05 (1.25-1.75)"
    assert f"| 7 of chat | 0 | draft head | 2.25 | 0.75 0.50 | 61.5 | {ratios} |" in text
    assert f"| 7 of chat | 0 | n-gram lookup | 1.50 | 0.75 0.50 | 61.5 | {ratios} |" in text
    assert "6 of 7 texts identical to those of transformers' greedy `generate` in float32" in text


def test_names_who_decodes_as_the_report_does(run):
    chosen = row("adaptive", nodes=20, num_speculative_tokens=4, rule="as drafted")
    chosen["speedup"]["hf_prompt_lookup"] = {"value": 1.5, "low": 1.25, "high": 1.75}
    report = {**REPORT, "suites": [*REPORT["suites"], chosen]}
    (run.parent / "eval" / "report.json").write_text(json.dumps(report))
    text = write_card(run).read_text()
    assert "| 7 of chat | 0 | adaptive |" in text
    assert "speedup over transformers prompt lookup" in text


def test_a_single_prompt_has_no_interval(run):
    report = copy.deepcopy(REPORT)
    for ratio in report["suites"][1]["speedup"].values():
        ratio.update(low=None, high=None)
    (run.parent / "eval" / "report.json").write_text(json.dumps(report))
    write_card(run)
    assert "| 61.5 | 1.50 | 2.05 |" in (run / "README.md").read_text()


def test_the_rule_of_sampled_text_is_named(run):
    report = {**REPORT, "suites": [row("head", temperature=1.0, rule="block")]}
    (run.parent / "eval" / "report.json").write_text(json.dumps(report))
    assert "| 7 of chat | 1 | draft head, rule block |" in write_card(run).read_text()


def test_a_tree_is_called_so(run):
    report = {**REPORT, "suites": [{**row("head"), "nodes": 16, "num_speculative_tokens": 3}]}
    (run.parent / "eval" / "report.json").write_text(json.dumps(report))
    assert "| draft head, tree of 16 |" in write_card(run).read_text()


def test_paths_of_this_machine_stay_here(run):
    text = write_card(run).read_text()
    assert "/home/somebody" not in text
    assert "| training data | org/chats, python-sources, notes.jsonl, data/local.jsonl |" in text


def test_how_to_run_it_is_what_export_says(run, capsys):
    text = write_card(run).read_text()
    assert 'load_head("D", target)' in text
    assert "python -m speculator generate --target org/base --speculator D" in text
    assert "loads in vLLM 0.5.1 to 0.9.2: vllm serve org/base --speculative-config" in text
    assert "DOES NOT LOAD in vLLM 0.33" in text
    assert "loads in arctic-inference 0.3.0" in text


def test_the_adapter_of_the_target_is_named(tmp_path):
    named = {"base_model_name_or_path": "org/base", "base_model_adapter": "/home/somebody/lora"}
    text = write_card(head_folder(tmp_path / "head", **named)).read_text()
    assert "| target | org/base --adapter lora |" in text
    assert "generate --target org/base --adapter lora --speculator D" in text
    assert 'Target.load("org/base", adapter="lora")' in text


def test_a_head_of_no_run_says_what_is_not_known(tmp_path):
    text = write_card(head_folder(tmp_path / "head")).read_text()
    assert "| target | not recorded |" in text
    assert "Not measured" in text
    assert "## Training" not in text
    assert "base_model:" not in text
    assert "license" not in text


@pytest.mark.parametrize("text", ["a: 1", "settings: [1, 2]", "settings: {theme: dark}", "[]"])
def test_a_config_of_something_else_beside_it_is_not_a_run(tmp_path, text):
    folder = head_folder(tmp_path / "head")
    (tmp_path / "config.yaml").write_text(text)
    assert "Not measured" in write_card(folder).read_text()


def test_the_licence_is_the_bases_own(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: llama3.1\nlanguage: en\n---\n# Base\n")
    folder = head_folder(tmp_path / "head", base_model_name_or_path=str(tmp_path / "base"))
    data = ModelCard.load(write_card(folder)).data.to_dict()
    assert data["license"] == "llama3.1"
    assert "base_model" not in data  # a folder here is no repository
    assert str(tmp_path) not in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["config.yaml", "eval/report.json"])
def test_a_damaged_record_is_one_line_and_leaves_no_card(run, name):
    (run.parent / name).write_text("{")
    with pytest.raises(UserError, match="can't be read") as error:
        write_card(run)
    assert not (run / "README.md").exists()
    assert str(run.parent) in str(error.value)


def test_an_export_takes_the_card_along(run, tmp_path):
    argv = ["export", "--speculator", str(run), "--format", "ibm", "--output"]
    assert main([*argv, str(tmp_path / "without")]) == 0  # made from the run
    assert "| stage1 | 300 |" in (tmp_path / "without" / "README.md").read_text()
    (run / "README.md").write_text("my own words")
    assert main([*argv, str(tmp_path / "with")]) == 0
    assert (tmp_path / "with" / "README.md").read_text() == "my own words"
