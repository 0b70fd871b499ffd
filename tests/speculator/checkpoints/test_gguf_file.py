"""GGUF files of heads: names, values and keys that llama.cpp's converter writes, computed here in another way."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import tiny_block_head, tiny_tokenizer
from gguf_files import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import Target
from speculator.__main__ import main
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

gguf = pytest.importorskip("gguf")
DFLASH = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False}
PLAIN = {"fc_norm": False, "norm_output": False}
TOKENS = [3, 5, 9, 17]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=128, **shape)
    made = Target(LlamaForCausalLM(config).eval(), tokenizer)
    made.file = str(write_gguf(tmp_path_factory.mktemp("base") / "base.gguf", made.model, tokenizer))
    return made


def head_of(target, kind, **changes):
    changes = {"aux_layers": [1, 3, 5], **changes}
    if kind == "block":
        return tiny_block_head(target, **changes)
    config = Eagle3SpeculatorConfig.for_target(target.config, n_predict=3, **{**PLAIN, **changes})
    made = Eagle3Speculator(config)
    if made.draft_tokens is not None:
        made.draft_tokens.copy_(torch.tensor(TOKENS))
    return bind(made, target)


def exported(target, head, tmp_path: Path, *flags: str) -> int:
    save(head, tmp_path / "native", layout_of("native", head))
    given = ["--speculator", tmp_path / "native", "--output", tmp_path / "out", "--base_model", target.file, *flags]
    return main(["export", "--format", "gguf", *map(str, given)])


def read(folder: Path):
    found = gguf.GGUFReader(folder / "head.gguf")
    return {name: field.contents() for name, field in found.fields.items()}, {each.name: each for each in found.tensors}


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_matrices_have_the_dtype_and_norms_are_float32(target, tmp_path, dtype, kind):
    head = head_of(target, "block")
    assert exported(target, head, tmp_path, "--dtype", dtype) == 0
    _, tensors = read(tmp_path / "out")
    assert {each.tensor_type.name for name, each in tensors.items() if len(each.shape) == 1} == {"F32"}
    assert {each.tensor_type.name for name, each in tensors.items() if len(each.shape) > 1} == {kind}
    assert len(tensors) == len(head.state_dict())
    stored = torch.from_numpy(gguf.dequantize(tensors["fc.weight"].data, tensors["fc.weight"].tensor_type).copy())
    assert torch.equal(stored, head.fc.weight.to(getattr(torch, dtype)).float())


def test_a_block_drafter_has_its_keys_and_the_targets_vocabulary(target, tmp_path):
    changes = {"sample_from_anchor": False, "is_causal": True, "sliding_window": 8, "draft_tokens": TOKENS}
    head = head_of(target, "block", **changes, confidence_head=False)
    assert exported(target, head, tmp_path) == 0
    keys, tensors = read(tmp_path / "out")
    expected = {
        "general.architecture": "dflash", "dflash.block_count": 2, "dflash.block_size": 4,
        "dflash.target_layers": [1, 3, 5], "dflash.attention.causal": True, "dflash.sample_from_anchor": False,
        "dflash.has_confidence_head": False, "dflash.attention.sliding_window": 8,
        "dflash.attention.sliding_window_pattern": [True, True], "tokenizer.ggml.mask_token_id": 0,
    }  # fmt: skip
    assert {name: keys.get(name) for name in expected} == expected
    base = {name: field.contents() for name, field in gguf.GGUFReader(target.file).fields.items()}
    vocabulary = {name: value for name, value in base.items() if name.startswith("tokenizer.")}
    assert len(vocabulary) >= 7
    assert vocabulary.items() <= {name: value for name, value in keys.items() if name in vocabulary}.items()
    assert tensors["d2t"].data.tolist() == TOKENS
    rows = target.model.get_output_embeddings().weight[TOKENS]
    assert torch.equal(torch.from_numpy(tensors["output.weight"].data.copy()), rows)
    markov = {"markov_w1.weight": head.markov_head.markov_w1, "markov_w2.weight": head.markov_head.markov_w2}
    for name, part in markov.items():
        assert torch.equal(torch.from_numpy(tensors[name].data.copy()), part.weight)


def test_the_query_and_key_of_eagle3_are_permuted_for_a_rope_of_neighbours(target, tmp_path):
    head = head_of(target, "eagle3", norm_before_fc=True, norm_before_residual=True, draft_vocab_size=len(TOKENS))
    assert exported(target, head, tmp_path) == 0
    keys, tensors = read(tmp_path / "out")
    assert keys["eagle3.target_layers"] == [1, 3, 5]
    assert keys["eagle3.norm_before_fc"] is keys["eagle3.norm_before_residual"] is True
    assert tensors["d2t"].data.tolist() == TOKENS
    size = head.config.head_dim
    order = [half * size // 2 + i for i in range(size // 2) for half in (0, 1)]  # 0, d/2, 1, d/2 + 1, ...
    attention = head.layers[0].self_attn
    for name, weight in (("attn_q", attention.q_proj.weight), ("attn_k", attention.k_proj.weight)):
        expected = weight.view(-1, size, weight.shape[1])[:, order].reshape(weight.shape)
        assert torch.equal(torch.from_numpy(tensors[f"blk.0.{name}.weight"].data.copy()), expected)
    assert torch.equal(torch.from_numpy(tensors["enc.output_norm.weight"].data.copy()), head.input_norm.weight)
    assert len(tensors) == len(head.state_dict())


def test_llama3_rope_of_eagle3_is_stored_as_factors(target, tmp_path):
    """The factors by the formula of Llama 3.1, frequency by frequency."""
    rope = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    head = head_of(target, "eagle3", rope_parameters={**rope, "original_max_position_embeddings": 32})
    assert exported(target, head, tmp_path) == 0
    keys, tensors = read(tmp_path / "out")
    assert keys["eagle3.rope.freq_base"] == 100.0
    expected = []
    for i in range(0, head.config.head_dim, 2):
        turns = 32 * 100.0 ** (-i / head.config.head_dim) / (2 * math.pi)  # in the original context
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / 4.0 + smooth))
    assert len({round(value, 3) for value in expected}) >= 3
    assert tensors["rope_freqs.weight"].data.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("eagle3", {"fc_norm": True, "norm_output": True}, "does not run fc_norm, norm_output"),
        ("eagle3", {"aux_layers": [1, 3]}, "needs 3 auxiliary layers"),
        ("block", {**DFLASH, "draft_tokens": TOKENS}, "refuses a DFlash head with a draft vocabulary"),
        ("block", {"markov_rank": 0}, "a head without Markov head"),
        ("block", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}}, "the linear rope"),
        (
            "eagle3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
            "only default or llama3",
        ),
    ],
)
def test_what_llama_cpp_ignores_or_refuses_is_refused(target, tmp_path, capsys, kind, changes, reason):
    assert exported(target, head_of(target, kind, **changes), tmp_path) == 2
    shown = capsys.readouterr().err
    assert reason in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_vocabulary_needs_the_targets_file(target, tmp_path, capsys):
    head = head_of(target, "block")
    save(head, tmp_path / "native", layout_of("native", head))
    given = ["--speculator", str(tmp_path / "native"), "--output", str(tmp_path / "out")]
    assert main(["export", "--format", "gguf", *given]) == 2
    assert "--base_model TARGET.gguf" in capsys.readouterr().err
