"""Code that comes with a target, checksums of a published head, and a head for other weights.

`tests/bad_inputs` has damaged targets and heads.
"""

import logging
import shutil

import pytest
import torch
from bad_inputs.damages import config, fields, flipped
from conftest import _SHAPE, exit_code, tiny_head, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from data.rendering import load_tokenizer
from speculator import MLPSpeculator, MLPSpeculatorConfig, Target, UserError, load_head
from speculator.__main__ import main
from speculator.checkpoints.layout import base_config
from speculator.files import MANIFEST, write_manifest
from speculator.target.fingerprint import same_target, similar_target
from train.door.settle import known_config
from train.options.config import RunConfig, TargetConfig


@pytest.fixture
def folder(target_folder, tmp_path):
    return shutil.copytree(target_folder, tmp_path / "target")


@pytest.fixture
def head_folder(tmp_path):
    MLPSpeculator(MLPSpeculatorConfig(vocab_size=300, emb_dim=32, inner_dim=16)).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def refused(folder, capsys) -> str:
    """Run `generate` and return its one line of error."""
    capsys.readouterr()
    assert exit_code(main, ["generate", "--target", str(folder), "--prompt", "x", "--max_new_tokens", "2"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


# --- code that comes with a model


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A model with Python code; every question is answered with yes."""
    monkeypatch.setattr("builtins.input", lambda *given: "y")
    code = f"open({str(tmp_path / 'executed')!r}, 'w')\nfrom transformers import PretrainedConfig as Own\n"
    code += "from transformers import LlamaForCausalLM as OwnModel, LlamaTokenizer as OwnTokenizer\n"
    (folder / "own.py").write_text(code)
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    config(model_type="own", auto_map=auto)(folder)
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    fields("tokenizer_config.json", **tokenizer)(folder)
    yield folder
    assert not (tmp_path / "executed").exists()


def test_code_of_a_target_is_not_run(with_code, capsys):
    assert "--trust_remote_code" in refused(with_code, capsys)


def test_code_of_a_tokenizer_or_base_is_not_run_either(with_code):
    with pytest.raises(UserError):
        load_tokenizer(str(with_code))
    assert base_config(str(with_code)) is None
    assert known_config(RunConfig(target=TargetConfig(str(with_code)))) is None


def test_a_published_head_is_verified_by_its_checksums(head_folder, capsys):
    write_manifest(head_folder)
    assert main(["inspect", str(head_folder)]) == 0
    flipped("model.safetensors", at=1)(head_folder)  # still a number
    capsys.readouterr()
    assert main(["inspect", str(head_folder)]) == 2
    assert "checksum" in capsys.readouterr().err
    (head_folder / MANIFEST).unlink()
    assert main(["inspect", str(head_folder)]) == 0


# --- a head and its target


def test_a_fingerprint_depends_on_the_weights_only():
    target = Target(tiny_model(), tokenizer=None)
    assert same_target(target.fingerprint, Target(tiny_model().bfloat16(), tokenizer=None).fingerprint)
    assert same_target(target.fingerprint, Target(tiny_model().half(), tokenizer=None).fingerprint)
    torch.manual_seed(7)
    other = LlamaForCausalLM(LlamaConfig(**_SHAPE))
    assert not same_target(target.fingerprint, Target(other, tokenizer=None).fingerprint)
    assert not same_target(target.fingerprint, Target(tiny_model("qwen2"), tokenizer=None).fingerprint)
    assert not same_target(target.fingerprint, "")
    assert not same_target(target.fingerprint, target.fingerprint[:-4])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_copy_is_recognised(bits, tmp_path, caplog):
    target = Target(tiny_model(), tokenizer=None)
    model = tiny_model()
    for weight in model.parameters():
        step = 2 * weight.data.abs().max() / (2**bits - 1)
        weight.data = (weight.data / step).round() * step
    copied = Target(model, tokenizer=None)
    assert not same_target(target.fingerprint, copied.fingerprint)
    assert similar_target(target.fingerprint, copied.fingerprint)
    head = tiny_head()
    head.config.base_model_fingerprint = target.fingerprint
    head.save_pretrained(tmp_path)
    load_head(tmp_path, copied)
    assert "quantised copy" in caplog.text


def test_a_head_for_other_weights_is_not_taken_for_one_of_a_quantised_copy():
    target = Target(tiny_model(), tokenizer=None)
    torch.manual_seed(7)
    other = Target(LlamaForCausalLM(LlamaConfig(**_SHAPE)), tokenizer=None)
    assert not similar_target(target.fingerprint, other.fingerprint)
    assert not similar_target(target.fingerprint, "")


def test_a_head_for_other_weights_of_the_same_sizes_warns_once(tmp_path, caplog, capsys):
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
    assert "its/own" in line
    caplog.clear()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "head")]) == 0
    assert target.fingerprint in capsys.readouterr().out
    # Layouts of servers store the fingerprint too.
    flags = ["--speculator", str(tmp_path / "head"), "--format", "ibm", "--output", str(tmp_path / "ibm")]
    assert main(["export", *flags]) == 0
    load_head(tmp_path / "ibm", Target(model, tokenizer=None))
    assert ["its/own" in line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING] == [True]
