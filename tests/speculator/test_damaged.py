"""Damaged folders of targets and heads: one line each, before anything large is made of them."""

import json
import logging
import os
import pickle
import shutil

import pytest
import torch
from conftest import _SHAPE, exit_code, tiny_head, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from data.rendering import load_tokenizer
from speculator import MLPSpeculator, MLPSpeculatorConfig, Target, UserError, load_head
from speculator.__main__ import main
from speculator.checkpoints.layout import base_config
from speculator.sealed import MANIFEST, seal
from speculator.target.model import same_target
from train.config import RunConfig
from train.dry_run import _known_config


@pytest.fixture
def folder(target_folder, tmp_path):
    return shutil.copytree(target_folder, tmp_path / "target")


@pytest.fixture
def head_folder(tmp_path):
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16)).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder, change):
    file = folder / "model.safetensors"
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def refused(folder, capsys) -> str:
    """What `generate` says of a target in its one line."""
    capsys.readouterr()
    assert exit_code(main, ["generate", "--target", str(folder), "--prompt", "x", "--max_new_tokens", "2"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


class Touch:
    """A pickle that does something when it is opened."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def as_pickle(folder, content):
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(content, file)


def as_shards(folder, **weight_map):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def fifo(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)


DAMAGE = {
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
    "config is empty": (lambda f: (f / "config.json").write_text(""), "not JSON"),
    "config is nested": (lambda f: (f / "config.json").write_text('{"a":' * 10**5), "can't be read"),
    "config is UTF-16": (lambda f: (f / "config.json").write_bytes("{}".encode("utf-16")), "not UTF-8"),
    "config is a pipe": (lambda f: fifo(f, "config.json"), "no config.json"),
    "config of nothing": (lambda f: (f / "config.json").write_text("{}"), "can't load the target"),
    "no such type": (lambda f: edit(f, model_type="nonesuch"), "nonesuch"),
    "type of a list": (lambda f: edit(f, model_type=["llama"]), "can't load the target"),
    "size of a text": (lambda f: edit(f, hidden_size="32"), "hidden_size"),
    "size of NaN": (lambda f: edit(f, hidden_size=float("nan")), "hidden_size"),
    "heads of 0": (lambda f: edit(f, num_attention_heads=0), "can't load the target"),
    "a billion layers": (lambda f: edit(f, num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "a billion labels": (lambda f: edit(f, num_labels=10**9), "num_labels is 1000000000"),
    "hidden of a billion": (lambda f: edit(f, hidden_size=10**9), "its config describes"),
    "inner of a trillion": (lambda f: edit(f, intermediate_size=10**12), "its config describes"),
    "vocabulary of a trillion": (lambda f: edit(f, vocab_size=10**12), "its config describes"),
    "larger than 64 bits": (lambda f: edit(f, vocab_size=10**30), "can't load the target"),
    "context of 1": (lambda f: edit(f, max_position_embeddings=1), "a context of 1 tokens"),
    "context below 0": (lambda f: edit(f, max_position_embeddings=-5), "a context of -5 tokens"),
    "fewer layers than stored": (lambda f: edit(f, num_hidden_layers=1), "more layers than the 1 of its config.json"),
    "hidden of 0": (lambda f: edit(f, hidden_size=0), "a model of size 0"),
    "context of 0": (lambda f: edit(f, max_position_embeddings=0), "a context of 0 tokens"),
    "generation config of a list": (
        lambda f: (f / "generation_config.json").write_text("[]"),
        "generation_config.json",
    ),
    "generation config of nothing": (lambda f: (f / "generation_config.json").write_text(""), "generation_config.json"),
    "generation config of bytes": (
        lambda f: (f / "generation_config.json").write_bytes(b"\xff\xfe"),
        "generation_config.json: not UTF-8",
    ),
    "tokenizer config of a list": (lambda f: (f / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
    "end token of a text": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "end"}'),
        "eos_token_id is 'end'",
    ),
    "tokenizer cut": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0", "model"'),
        "can't load the target",
    ),
    "tokenizer of a list": (lambda f: (f / "tokenizer.json").write_text("[1]"), "can't load the target"),
    "no tokenizer": (lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")], "tokenizer"),
    "another tokenizer": (lambda f: tiny_tokenizer(400).save_pretrained(f), "has 400 tokens, the model only 300"),
    "weights of 0": (lambda f: edit_weights(f, torch.zeros_like), "all the same: the weights are empty"),
    "weights of NaN": (lambda f: edit_weights(f, lambda w: w * float("nan")), "not finite: the weights are damaged"),
    "weights cut": (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors: damaged"),
    "weights of text": (lambda f: (f / "model.safetensors").write_text("weights"), "model.safetensors: damaged"),
    "weights a pipe": (lambda f: fifo(f, "model.safetensors"), "no weights there"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights there"),
    "a shard missing": (lambda f: as_shards(f, x="model-00002-of-00002.safetensors"), "is missing"),
    "a shard elsewhere": (lambda f: as_shards(f, x="../target/config.json"), "is not a file name"),
    "an index of nothing": (as_shards, "no weight_map"),
    "a pickle of more": (lambda f: as_pickle(f, {"w": Touch(), "x": "0" * 10**6}), "can't load the target"),
    "a pickle of less": (lambda f: as_pickle(f, {}), "can't load the target"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_target_is_one_line(folder, monkeypatch, tmp_path, capsys, damage):
    monkeypatch.chdir(tmp_path)
    change, message = DAMAGE[damage]
    change(folder)
    line = refused(folder, capsys)
    assert message in line
    assert str(folder) in line
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["", "a\0b", "./nowhere", "/dev/null", "x" * 5000])
def test_a_name_that_is_none_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(name, capsys)


def test_pickled_weights_alone_are_read_as_weights(folder, target_folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    target = Target.load(str(folder))
    assert torch.equal(target.model.lm_head.weight, Target.load(str(target_folder)).model.lm_head.weight)


# --- code that comes with a model


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A model with code of its own; whoever is asked says yes."""
    monkeypatch.setattr("builtins.input", lambda *given: "y")
    code = f"open({str(tmp_path / 'executed')!r}, 'w')\nfrom transformers import PretrainedConfig as Own\n"
    code += "from transformers import LlamaForCausalLM as OwnModel, LlamaTokenizer as OwnTokenizer\n"
    (folder / "own.py").write_text(code)
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    edit(folder, model_type="own", auto_map=auto)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    yield folder
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", ["[1]", "null", "{}", '{"model": {"type": "nonesuch"}}'])
def test_a_damaged_tokenizer_alone_is_one_line(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match="can't load the tokenizer"):
        load_tokenizer(str(folder))


def test_code_of_a_target_is_not_run_whoever_is_asked(with_code, capsys):
    assert "needs Python code of its own, which is not run" in refused(with_code, capsys)


def test_code_of_a_tokenizer_or_base_is_not_run_either(with_code):
    with pytest.raises(UserError):
        load_tokenizer(str(with_code))
    assert base_config(str(with_code)) is None
    config = RunConfig()
    config.target.name_or_path = str(with_code)
    assert _known_config(config) is None


# --- heads


HEADS = {
    "a hundred million steps": (lambda f: edit(f, n_predict=10**8), "n_predict must be at most 256"),
    "inner of a billion": (lambda f: edit(f, inner_dim=10**9), "config.json says"),
    "vocabulary of a trillion": (lambda f: edit(f, vocab_size=10**12), "config.json says"),
    "larger than 64 bits": (lambda f: edit(f, vocab_size=10**30), "no tensor can have"),
    "product larger than 64 bits": (lambda f: edit(f, vocab_size=2**40, inner_dim=2**40), "no tensor can have"),
    "draft vocabulary of a trillion": (lambda f: edit(f, vocab_size=10**13, draft_vocab_size=10**12), "missing"),
    "steps of NaN": (lambda f: edit(f, n_predict=float("nan")), "n_predict is nan, not int"),
    "fingerprint of a number": (lambda f: edit(f, base_model_fingerprint=3), "base_model_fingerprint is 3, not str"),
    "config is nested": (lambda f: (f / "config.json").write_text('{"a":' * 10**5), "can't be read"),
    "config is UTF-16": (lambda f: (f / "config.json").write_bytes("{}".encode("utf-16")), "not UTF-8"),
    "config is a pipe": (lambda f: fifo(f, "config.json"), "no config.json"),
    "weights a pipe": (lambda f: fifo(f, "model.safetensors"), "no weights there"),
    "weights cut": (lambda f: os.truncate(f / "model.safetensors", 5000), "model.safetensors: damaged"),
    "weights of NaN": (lambda f: edit_weights(f, lambda w: w * float("nan")), "not finite"),
    "too many": (
        lambda f: save_file({f"w{i}": torch.zeros(1) for i in range(9999)}, f / "model.safetensors"),
        "tensors that do not belong here",
    ),
    "a pickle of more": (lambda f: as_pickle(f, {"w": Touch()}), "not opened"),
    "spread": (
        lambda f: [
            edit(f, vocab_size=10**12),
            (f / "model.safetensors").unlink(),
            torch.save({"emb.0.weight": torch.zeros(1).expand(10**12, 16)}, f / "pytorch_model.bin"),
        ],
        "less than that is stored",
    ),
}


@pytest.mark.parametrize("damage", HEADS)
def test_a_damaged_head_is_one_line(head_folder, monkeypatch, tmp_path, capsys, damage):
    monkeypatch.chdir(tmp_path)
    change, message = HEADS[damage]
    change(head_folder)
    capsys.readouterr()
    assert main(["inspect", str(head_folder)]) == 2
    line = capsys.readouterr().err
    assert message in line
    assert line.count("\n") == 1
    assert not (tmp_path / "executed").exists()


def test_a_head_that_a_run_published_is_known_by_its_checksums(head_folder, capsys):
    seal(head_folder)
    assert main(["inspect", str(head_folder)]) == 0
    weights = head_folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # still a number
    weights.write_bytes(content)
    capsys.readouterr()
    assert main(["inspect", str(head_folder)]) == 2
    assert "model.safetensors does not match its checksum; if it was changed on purpose" in capsys.readouterr().err
    (head_folder / MANIFEST).unlink()
    assert main(["inspect", str(head_folder)]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--branches", "4096,4096,4096"],
        ["--branches", "4096,4096,4096", "--nodes", "8"],
        ["--branches", "64,64,64", "--paths", "3"],
        ["--branches", "9,9", "--nodes", "1000000000"],
        ["--branches", "9,9", "--paths", "1000000000"],
        ["--branches", ",".join(["2"] * 5000)],
        ["--num_speculative_tokens", "1000000000"],
    ],
)
@pytest.mark.parametrize("who", [["--draft_model", "nowhere"], ["--speculator", "nowhere"], ["--ngram"]])
def test_an_absurd_draft_is_one_line_before_anything_is_loaded(flags, who, capsys):
    assert main(["generate", "--target", "nowhere", "--prompt", "x", *who, *flags]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "nowhere" not in line


# --- a head and its target


def test_a_fingerprint_is_of_the_weights_alone():
    target = Target(tiny_model(), tokenizer=None)
    assert same_target(target.fingerprint, Target(tiny_model().bfloat16(), tokenizer=None).fingerprint)
    assert same_target(target.fingerprint, Target(tiny_model().half(), tokenizer=None).fingerprint)
    torch.manual_seed(7)
    other = LlamaForCausalLM(LlamaConfig(**_SHAPE))
    assert not same_target(target.fingerprint, Target(other, tokenizer=None).fingerprint)
    assert not same_target(target.fingerprint, Target(tiny_model("qwen2"), tokenizer=None).fingerprint)
    assert not same_target(target.fingerprint, "")
    assert not same_target(target.fingerprint, target.fingerprint[:-4])


def test_a_head_for_other_weights_of_the_same_sizes_is_said_once(tmp_path, caplog, capsys):
    target = Target(tiny_model(), tokenizer=None)
    head = tiny_head()
    head.config.base_model_name_or_path, head.config.base_model_fingerprint = "its/own", target.fingerprint
    head.save_pretrained(tmp_path / "head")
    load_head(tmp_path / "head", target)
    assert not caplog.messages
    model = tiny_model()
    model.lm_head.weight.data.neg_()
    model.model.embed_tokens.weight.data.neg_()
    load_head(tmp_path / "head", Target(model, tokenizer=None))
    (line,) = caplog.messages
    assert "was trained for other weights (its/own)" in line
    caplog.clear()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "head")]) == 0
    assert target.fingerprint in capsys.readouterr().out
    # Servers' layouts have no place for it.
    flags = ["--speculator", str(tmp_path / "head"), "--format", "ibm", "--output", str(tmp_path / "ibm")]
    assert main(["export", *flags]) == 0
    load_head(tmp_path / "ibm", Target(model, tokenizer=None))
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]
