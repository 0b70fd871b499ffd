"""Heads by hub id, found in the hub's cache on this machine; nothing is downloaded."""

import shutil
from types import SimpleNamespace

import httpx
import pytest
import torch
from conftest import settled, tiny_head, tiny_model
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file

from speculator import Target, UserError
from speculator.__main__ import main
from speculator.checkpoints import head_folder, load_any, recognise
from train.door.head import with_settings_of_start
from train.options.config import HeadOptions, RunConfig

SHA = {"main": "1" * 40, "v2": "2" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A head in ./head, and as org/name in the cache; `asked` has the names and revisions that were looked up."""
    head, cached, asked, got = tiny_head(), tmp_path / "cache" / "models--org--name", [], []
    head.save_pretrained(tmp_path / "head")
    (cached / "refs").mkdir(parents=True)
    for name, commit in SHA.items():
        (cached / "refs" / name).write_text(commit)
        shutil.copytree(tmp_path / "head", cached / "snapshots" / commit)

    def recorded(name, revision, **patterns):
        files = ["config.json", "model.safetensors", "README.md", "pytorch_model.bin"]
        files += ["optimizer.pt", "run.py", "old/optimizer.safetensors"]
        wanted = list(filter_repo_objects(files, **patterns))
        assert wanted in (files[:1], files[:3], files[3:4]), "the config first, then files of a head only"
        asked.append((name, revision))
        got.append(wanted)
        return snapshot_download(name, revision=revision, **patterns)

    monkeypatch.setattr("speculator.checkpoints.hub.snapshot_download", recorded)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(head=head, asked=asked, got=got, cached=cached)


def test_a_hub_id_is_read_from_the_cache(hub):
    loaded = load_any("org/name")
    assert all(loaded.state_dict()[name].equal(value) for name, value in hub.head.state_dict().items())
    assert recognise("org/name").name == "native"
    assert head_folder("org/name").name == SHA["main"]
    assert set(hub.asked) == {("org/name", None)}


def test_a_pickle_is_downloaded_only_without_safetensors(hub):
    load_any("org/name")
    assert ["pytorch_model.bin"] not in hub.got
    weights = hub.cached / "snapshots" / SHA["main"] / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    assert head_folder("org/name").name == SHA["main"]
    assert hub.got[-1] == ["pytorch_model.bin"]


def test_only_a_hub_id_has_revisions(hub):
    assert head_folder("org/name", "v2").name == SHA["v2"]
    assert head_folder("head").samefile("head")
    with pytest.raises(UserError, match="revision v2: head is no hub id"):
        head_folder("head", "v2")
    with pytest.raises(UserError, match="org/other: no such folder"):
        head_folder("org/other")


def test_inspect_and_export_take_a_hub_id(hub, capsys):
    assert main(["inspect", "org/name", "--speculator_revision", "v2"]) == 0
    assert "native" in capsys.readouterr().out
    assert main(["export", "--speculator", "org/name", "--format", "native", "--output", "mine"]) == 0
    assert load_any("mine").config.inner_dim == hub.head.config.inner_dim
    capsys.readouterr()
    assert main(["inspect", "org/other"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_starts_from_a_head_of_the_hub(hub):
    start = HeadOptions(warm_start="org/name", warm_start_revision="v2")
    config = with_settings_of_start(RunConfig(speculator=start), ())
    assert config.speculator.n_predict == hub.head.config.n_predict
    assert set(hub.asked) == {("org/name", "v2")}
    with pytest.raises(UserError, match="warm_start_revision needs"):
        settled(RunConfig(speculator=HeadOptions(warm_start_revision="v2")), checked=True)


@pytest.mark.parametrize(
    "command", [["eval", "gate", "org/name", "head"], ["adapt", "--record", ".", "--speculator", "org/name"]]
)
def test_gate_and_adapt_take_a_revision(hub, command, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", lambda *_, **__: Target(tiny_model(), tokenizer=None))
    flags = ["--target", "T", "--suite", "none.jsonl"] if "gate" in command else []
    assert main([*command, *flags, "--speculator_revision", "v2"]) == 2  # the next thing is missing
    assert set(hub.asked) == {("org/name", "v2")}


def test_of_a_repository_without_a_head_the_config_alone_is_downloaded(hub, capsys):
    config = hub.cached / "snapshots" / SHA["main"] / "config.json"
    config.write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert main(["inspect", "org/name"]) == 2
    assert "LlamaForCausalLM" in capsys.readouterr().err
    assert hub.got == [["config.json"]]


@pytest.mark.parametrize("error", [httpx.ConnectError("no route"), httpx.ReadTimeout("late"), OSError("disk full")])
def test_a_broken_download_is_one_line(monkeypatch, capsys, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr("speculator.checkpoints.hub.snapshot_download", broken)
    assert main(["inspect", "org/name"]) == 2
    shown = capsys.readouterr().err
    assert str(error) in shown
    assert shown.count("\n") == 1
