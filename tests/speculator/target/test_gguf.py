import builtins

import pytest
import torch
from conftest import tiny_tokenizer
from gguf_files import TEMPLATE, tiny_llama, write_gguf

from data.cli.generate import _context_length
from data.rendering import load_tokenizer
from speculator import Sampling, Target, UserError, generate
from speculator.__main__ import build_parser
from speculator.checkpoints.layout import base_config
from speculator.target.gguf import metadata
from train.command_line import parse
from train.dry_run import known_config

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer(280)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_llama(len(tokenizer))


@pytest.fixture(scope="module")
def file(tmp_path_factory, model, tokenizer):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.F32.gguf", model, tokenizer)


@torch.no_grad()
def test_a_target_has_the_weights_tokenizer_and_settings_of_its_file(file, model, tokenizer):
    target = Target.load(str(file))
    assert target.name == str(file)
    assert not hasattr(target.config, "quantization_config")  # dequantised
    assert target.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert target.context_length == 128
    assert target.tokenizer.chat_template == TEMPLATE
    text = "<|im_start|>user\ndef wrap(self, text):<|im_end|>"
    tokens = tokenizer(text)["input_ids"]
    assert target.tokenizer(text, add_special_tokens=False)["input_ids"] == tokens
    assert load_tokenizer(str(file))(text, add_special_tokens=False)["input_ids"] == tokens
    ours = target.logits(target.hidden(torch.tensor([tokens])))
    torch.testing.assert_close(ours, model(torch.tensor([tokens])).logits, atol=1e-5, rtol=1e-4)
    assert len(generate(target, None, [tokens], Sampling(), max_new_tokens=4).tokens[0]) <= 4


def test_the_config_is_read_without_the_weights(file, tmp_path):
    flags = ["--target", str(file), "--sources", "x", "--output", "y"]
    assert _context_length(build_parser("data generate").parse_args(flags)) == 128
    known = known_config(parse(["--target.name_or_path", str(file)]))
    for config in (known, base_config(str(file))):
        assert (config.model_type, config.hidden_size, config.max_position_embeddings) == ("llama", 32, 128)
    assert base_config(str(tmp_path / "none.gguf")) is None
    with pytest.raises(UserError, match=r"none\.gguf"):
        known_config(parse(["--target.name_or_path", str(tmp_path / "none.gguf")]))


@pytest.mark.parametrize("field", ["context_length", "eos_token_id", "tokens"])
def test_a_missing_field_is_named(tmp_path, model, tokenizer, field):
    file = write_gguf(tmp_path / "less.gguf", model, tokenizer, leave_out=field)
    for load in (Target.load, load_tokenizer):
        with pytest.raises(UserError, match=field):
            load(str(file))


@pytest.mark.parametrize("kept", [40, 2000, -100])
def test_a_truncated_file_fails_in_one_line(file, tmp_path, kept):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"cut\.gguf") as error:
        Target.load(str(cut))
    assert "\n" not in str(error.value)


def test_a_file_of_another_format_is_a_user_error(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    (tmp_path / "c.gguf").mkdir()
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        with pytest.raises(UserError, match=name):
            Target.load(str(tmp_path / name))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named(file, monkeypatch, package):
    metadata.cache_clear()
    original = builtins.__import__

    def without(name, *rest, **named):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=f"pip install {package}"):
        Target.load(str(file))


def test_loading_shows_no_progress_bar_without_a_terminal(file, capfd):
    Target.load(str(file))
    assert "de-quantizing" not in capfd.readouterr().err
