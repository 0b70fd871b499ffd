from dataclasses import replace

import pytest
import yaml
from conftest import tiny_head
from huggingface_hub import ModelCard
from reports import around, report, report_row

from speculator import UserError
from speculator.__main__ import main
from speculator.checkpoints.card import copy_card, write_card
from speculator.report import Identical, Interval, write_record

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


def row(drafter: str, length: float = 2.25, **changes):
    speeds = {"speculative": 61.5, "plain": 41.0, "hf_generate": 30.0}
    made = {"name": "chat", "prompts": 7, "num_speculative_tokens": 2, "tokens_per_second": speeds, "rule": "greedy"}
    if drafter != "none":
        made["speedup"] = {"plain": around(1.5, 0.25), "hf_generate": around(2.05, 0.25)}
    return report_row(drafter, 1.4, length, **{**made, **changes})


REPORT = report(
    row("none", 1.0),
    row("head", identical_to_greedy=Identical(6, 7, "float32")),
    row("ngram", 1.5),
    hardware="GPU of the test",
    versions={"torch": "2.13.0", "python": "3.11"},
    settings={"batch_size": 1, "dtype": "bfloat16"},
)


def head_folder(folder, **recorded):
    head = tiny_head()
    for name, value in recorded.items():
        setattr(head.config, name, value)
    head.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path):
    sources = ["org/chats", "python-sources", "/home/somebody/private/notes.jsonl", "data/local.jsonl"]
    folder = head_folder(tmp_path / "run" / "speculator", base_model_name_or_path="org/base", training_data=sources)
    record = {"settings": SETTINGS, "versions": VERSIONS, "git_commit": "abc123", "processes": 4}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(record))
    (tmp_path / "run" / "eval").mkdir()
    write_record(tmp_path / "run" / "eval" / "report.json", REPORT)
    return folder


def test_front_matter_is_readable_by_the_hub(run):
    data = ModelCard.load(write_card(run)).data.to_dict()
    assert data == {
        "base_model": "org/base",
        "datasets": ["org/chats"],
        "library_name": "speculator",
        "tags": ["speculative-decoding", "mlp-speculator"],
    }


def test_hub_datasets_are_named_without_config_split_and_weight(tmp_path):
    sources = ["org/chats:train_sft@0.85", "org/all/one-part:train@.15", "org/chats", "notes/mine.jsonl@0.5"]
    data = ModelCard.load(write_card(head_folder(tmp_path, training_data=sources))).data.to_dict()
    assert data["datasets"] == ["org/chats", "org/all"]


def test_a_local_folder_is_not_a_hub_dataset(run, tmp_path, monkeypatch):
    (tmp_path / "org" / "chats").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "datasets" not in ModelCard.load(write_card(run)).data.to_dict()


def test_the_recipe_counts_the_sequences_of_all_processes(run):
    text = write_card(run).read_text()
    assert "| stage1 | 300 steps | 24 | 0.001, cosine |" in text
    assert "Loss: kl 1." in text
    parameters = sum(weight.numel() for weight in tiny_head().parameters())
    assert f"| parameters | {parameters:,}, float32 |" in text
    assert "torch 2.13.0, transformers 5.23.0, python 3.11, commit abc123" in text


def test_a_copied_card_has_the_parameters_and_the_form_of_the_exported_head(run, tmp_path):
    card, head = write_card(run), tiny_head(n_predict=2).bfloat16()
    copy_card(card, tmp_path / "copy.md", None, head)
    before, after = card.read_text().splitlines(), (tmp_path / "copy.md").read_text().splitlines()
    changed = [line for line, old in zip(after, before, strict=True) if line != old]
    parameters = sum(weight.numel() for weight in head.parameters())
    assert changed == [f"| parameters | {parameters:,}, bfloat16 |", "| form | 2 heads, tied, input scaled |"]


def test_a_copied_card_names_another_base_everywhere(run, tmp_path):
    text = write_card(run).read_text()
    copy_card(run / "README.md", tmp_path / "copy.md", ("org/base", "new/one"), tiny_head(n_predict=2))
    copied = (tmp_path / "copy.md").read_text()
    assert text.count("org/base") > 4
    assert "org/base" not in copied
    assert copied.count("new/one") == text.count("org/base")


def test_a_copied_card_names_another_file_where_it_names_the_target(tmp_path):
    text = (
        '# Draft head for target.gguf\n\nthe target verifies; target = Target.load("target.gguf")\n'
        "speculator dequantise --target target.gguf --output target, then vllm serve target --x\n"
        "llama-server -m target.gguf -md HEAD.gguf\n"
    )
    (tmp_path / "README.md").write_text(text)
    copy_card(tmp_path / "README.md", tmp_path / "copy.md", ("/data/target.gguf", "/models/new.gguf"), tiny_head())
    copied = (tmp_path / "copy.md").read_text()
    assert copied.partition("# Draft")[2] == (
        ' head for new.gguf\n\nthe target verifies; target = Target.load("new.gguf")\n'
        "speculator dequantise --target new.gguf --output new, then vllm serve new --x\n"
        "llama-server -m new.gguf -md HEAD.gguf\n"
    )


def test_a_learning_rate_for_other_rows_and_another_width_says_so(run):
    settings = yaml.safe_load((run.parent / "config.yaml").read_text())
    settings["settings"]["stage1"] |= {"base_batch_size": 8, "base_width": 4096}
    (run.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "| 0.001 for 8 sequences at width 4096, cosine |" in write_card(run).read_text()


def test_results_hold_every_drafter_and_baseline(run):
    adaptive = row("adaptive", nodes=20, num_speculative_tokens=4, rule="as drafted")
    tree = row("head", temperature=1.0, rule="block", nodes=16, num_speculative_tokens=3)
    tree = replace(tree, speedup={name: Interval(ratio.value) for name, ratio in tree.speedup.items()})  # one prompt
    write_record(run.parent / "eval" / "report.json", replace(REPORT, suites=[*REPORT.suites, adaptive, tree]))
    text = write_card(run).read_text()
    assert "GPU of the test; batch size 1, dtype bfloat16." in text
    assert "acceptance length | acceptance by position | tokens/s | speedup over plain decoding |" in text
    assert "| 7 of chat | 0 | plain decoding | 1.00 |  | 41.0 |  |  |  |" in text
    ratios = "1.50 (1.25-1.75) | 2.05 (1.80-2.30) | 1.40 (1.35-1.45)"
    assert f"| 7 of chat | 0 | draft head, chain of 2 | 2.25 | 0.75 0.50 | 61.5 | {ratios} |" in text
    assert f"| 7 of chat | 0 | n-gram lookup | 1.50 | 0.75 0.50 | 61.5 | {ratios} |" in text
    assert "| 7 of chat | 0 | adaptive |" in text
    assert "| 7 of chat | 1 | draft head, tree of 16, rule block | 2.25 | 0.75 0.50 | 61.5 | 1.50 | 2.05 | 1.40" in text
    assert "Temperature 0, chat: 6 of 7 texts" in text


def test_absolute_paths_are_not_published(run):
    text = write_card(run).read_text()
    assert "/home/somebody" not in text
    assert "| training data | org/chats, python-sources, notes.jsonl, data/local.jsonl |" in text


def test_the_card_shows_how_to_run_the_head(run):
    text = write_card(run).read_text()
    assert 'load_head("D", target)' in text
    assert "speculator generate --target org/base --speculator D" in text
    assert "\nby its source, loads in vLLM 0.5.1 to 0.9.2 (V0 engine): vllm serve org/base --speculative-config" in text
    assert "\nDOES NOT LOAD in vLLM 0.33" in text
    assert "\n[arctic]\nby its source, loads in arctic-inference 0.3.0" in text


def test_the_adapter_of_the_target_is_named(tmp_path):
    named = {"base_model_name_or_path": "org/base", "base_model_adapter": "/home/somebody/lora"}
    text = write_card(head_folder(tmp_path / "head", **named)).read_text()
    assert "| target | org/base --adapter lora |" in text
    assert "generate --target org/base --adapter lora --speculator D" in text
    assert 'Target.load("org/base", adapter="lora")' in text
    assert "loads in speculator: speculator generate --target org/base --adapter lora --speculator D" in text
    assert "/home" not in text


@pytest.mark.parametrize("config", [None, "a: 1", "settings: [1, 2]", "[]"])
def test_a_head_outside_a_run_has_no_training_and_no_results(tmp_path, config):
    folder = head_folder(tmp_path / "head")
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    text = write_card(folder).read_text()
    assert "| target | not recorded |" in text
    assert "Not measured" in text
    for absent in ("## Training", "base_model:", "license"):
        assert absent not in text


def test_the_license_is_the_base_models(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: llama3.1\nlanguage: en\n---\n# Base\n")
    folder = head_folder(tmp_path / "head", base_model_name_or_path=str(tmp_path / "base"))
    data = ModelCard.load(write_card(folder)).data.to_dict()
    assert data["license"] == "llama3.1"
    assert "base_model" not in data  # a local folder is not a repository
    assert str(tmp_path) not in (folder / "README.md").read_text()


@pytest.mark.parametrize(("own", "after"), [("license: llama3.1\nlicense_link: x\n", "llama3.1"), ("", None)])
def test_a_copied_card_has_the_license_of_the_new_base(tmp_path, own, after):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text(f"---\n{own}language: en\n---\n# Base\n")
    (tmp_path / "card.md").write_text("---\nlicense: other\nlicense_name: theirs\nbase_model: old/base\n---\n# Mine\n")
    copy_card(tmp_path / "card.md", tmp_path / "copy.md", ("old/base", str(tmp_path / "base")), tiny_head())
    data = ModelCard.load(tmp_path / "copy.md").data.to_dict()
    assert (data.get("license"), data.get("license_name")) == (after, None)


@pytest.mark.parametrize("name", ["config.yaml", "eval/report.json"])
def test_a_damaged_record_leaves_no_card(run, name):
    (run.parent / name).write_text("{")
    with pytest.raises(UserError, match=name):
        write_card(run)
    assert not (run / "README.md").exists()
    output = run.parent / "exported"
    assert main(["export", "--speculator", str(run), "--format", "ibm", "--output", str(output)]) == 2
    assert not output.exists()


def test_a_report_of_another_version_is_none(run, tmp_path, capsys):
    write_record(run.parent / "eval" / "report.json", replace(REPORT, schema=2))
    argv = ["export", "--speculator", str(run), "--format", "ibm", "--output", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "measure again with `speculator eval`" in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| stage1 | 300 steps |" in card
    assert "| draft head" not in card


def test_an_export_copies_or_creates_the_card(run, tmp_path):
    argv = ["export", "--speculator", str(run), "--format", "ibm", "--output"]
    assert main([*argv, str(tmp_path / "without")]) == 0
    assert "| stage1 | 300 steps |" in (tmp_path / "without" / "README.md").read_text()
    (run / "README.md").write_text("my own words")
    assert main([*argv, str(tmp_path / "with")]) == 0
    assert (tmp_path / "with" / "README.md").read_text() == "my own words"
