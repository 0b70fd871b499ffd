"""GGUF files of heads: names, values and keys that llama.cpp's converter writes, computed here in another way."""

from __future__ import annotations

import copy
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DFLASH, DFLASH2, tiny_block_head, tiny_tokenizer
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from speculator import Target
from speculator.__main__ import main
from speculator.checkpoints import gguf_file, layout_of, save
from speculator.checkpoints.loading import bind
from speculator.checkpoints.table import to_json
from speculator.checkpoints.targets import LLAMA_CPP, refusal
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.target.fingerprint import fingerprint, same_target
from train.command_line import parse

gguf = pytest.importorskip("gguf")
PLAIN = {"fc_norm": False, "norm_output": False}
TOKENS = [3, 5, 9, 17]
gguf_file_tensors, gguf_file_array = gguf_file.tensors, gguf_file._array


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


def test_a_dflash_2_head_has_llama_cpps_keys_and_names(target, tmp_path):
    """Names and keys of llama.cpp's loader; base kernels are float32, since it adds them to float32 values."""
    head = head_of(target, "block", **DFLASH2)
    assert exported(target, head, tmp_path, "--dtype", "bfloat16") == 0
    keys, tensors = read(tmp_path / "out")
    expected = {
        "general.architecture": "dflash", "dflash.block_size": 4, "dflash.conv_kernel_size": 2,
        "dflash.conv_group_size": 4, "dflash.selector_rank": 6, "dflash.selector_top_k": 4,
        "dflash.attention.causal": False,
    }  # fmt: skip
    assert {name: keys.get(name) for name in expected} == expected
    assert "dflash.sample_from_anchor" not in keys
    vocabulary, size, groups = head.config.vocab_size, 32, 8
    shapes = {"selector_hidden.weight": [size, 6]}
    shapes |= {f"selector_{name}.weight": [6, vocabulary] for name in ("predecessor", "successor")}
    for name in ("attn", "ffn"):
        shapes |= {f"blk.1.{name}_conv_base": [size, 2, 2], f"blk.1.{name}_conv_proj.weight": [size, 4 * groups]}
    assert {name: list(map(int, tensors[name].shape)) for name in shapes} == shapes
    assert tensors["blk.1.ffn_conv_base"].tensor_type.name == "F32"
    assert tensors["blk.1.ffn_conv_proj.weight"].tensor_type.name == "BF16"
    base = torch.from_numpy(tensors["blk.1.attn_conv_base"].data.copy())
    assert torch.equal(base, head.layers[1].attention_conv.base_kernel.bfloat16().float())
    assert len(tensors) == len(head.state_dict())


def test_the_rows_of_a_draft_vocabulary_are_those_of_the_target_that_the_head_was_trained_for(target, tmp_path, capsys):
    head = head_of(target, "block", draft_tokens=TOKENS)
    torch.manual_seed(1)
    other = LlamaForCausalLM(target.model.config)
    rounded = copy.deepcopy(target.model)
    for weight in rounded.parameters():
        weight.data = (weight.data * 200).round() / 200
    for number, (model, code) in enumerate(((target.model, 0), (rounded, 0), (other, 2))):
        head.config.base_model_fingerprint = fingerprint(model)
        assert exported(target, head, tmp_path / str(number)) == code
    assert "other weights than the head was trained for" in capsys.readouterr().err
    empty = SimpleNamespace(config=target.model.config, state_dict=dict)
    file = str(write_gguf(tmp_path / "vocabulary.gguf", empty, target.tokenizer))
    assert exported(SimpleNamespace(file=file), head, tmp_path / "3") == 2
    assert f"{file} has no output matrix" in capsys.readouterr().err


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
    ("fault", "kind", "named"),
    [
        (("_PARTS", {**gguf_file._PARTS, "mlp.gate_proj": "ffn_up", "mlp.up_proj": "ffn_gate"}), "block", "gate_proj"),
        (("_OTHERS", {**gguf_file._OTHERS, "fc": "fd"}), "block", "fc.weight"),
        (("tensors", lambda head, packed, _: gguf_file_tensors(head, packed, False)), "eagle3", "q_proj"),
        (("_array", lambda each: gguf_file_array(each if each.ndim > 1 else each + 1)), "eagle3", "norm.weight"),
    ],
)
def test_a_head_that_the_file_does_not_describe_is_not_kept(target, tmp_path, capsys, monkeypatch, fault, kind, named):
    """The export reads its file as llama.cpp does: not by the tables and the permutation that wrote it."""
    monkeypatch.setattr(gguf_file, *fault)
    assert exported(target, head_of(target, kind), tmp_path) == 2
    error = capsys.readouterr().err
    assert "the written head differs in" in error
    assert named in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["attention.head_count_kv", "rope.freq_base", "target_layers", "context_length"])
def test_a_key_that_is_not_the_heads_is_found(target, tmp_path, monkeypatch, capsys, key):
    def wrong(table, config, dtype):
        keys = to_json(table, config, dtype)
        return {name: value * 2 if name.endswith(f".{key}") else value for name, value in keys.items()}

    monkeypatch.setattr("speculator.checkpoints.layout.to_json", wrong)
    for kind in ("eagle3", "block"):
        assert exported(target, head_of(target, kind), tmp_path / kind) == 2
        assert "the written head differs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("eagle3", {"fc_norm": True, "norm_output": True}, "fc_norm, norm_output: configs/llama-cpp.yaml"),
        ("eagle3", {"aux_layers": [1, 3]}, "does not run 2 auxiliary layers"),
        ("block", {**DFLASH, "draft_tokens": TOKENS}, "does not run a draft vocabulary of a DFlash head"),
        ("block", {"markov_rank": 0}, "does not run a DSpark head of Markov rank 0"),
        ("block", {**DFLASH, "conv_group_size": 4}, "with a selector only, and this head has none"),
        ("block", {**DFLASH2, "selector_top_k": 6}, "does not run a selector over 6 tokens below hidden size 42"),
        (
            "block",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
            "does not run the linear rope",
        ),
        (
            "eagle3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}},
            "does not run the linear rope",
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


def test_the_recipe_for_llama_cpp_trains_a_head_that_it_runs(target):
    config = parse(["--config", "configs/llama-cpp.yaml", "--target.name_or_path", target.file])
    for options, stored in ((config.speculator.options, True), ({}, False)):
        head = Eagle3Speculator(Eagle3SpeculatorConfig.for_target(target.config, aux_layers=[1, 3, 5], **options))
        assert layout_of("gguf", head).stores(head) is stored


@pytest.fixture(scope="module")
def without_inputs(target, tmp_path_factory) -> str:
    """The same target under an architecture whose graph sets no layer inputs."""
    file = tmp_path_factory.mktemp("gemma") / "base.gguf"
    return str(write_gguf(file, target.model, target.tokenizer, architecture="gemma3"))


@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle3", "gguf"), ("block", "gguf"), ("eagle3", "eagle3"), ("block", "dspark")]
)
def test_a_target_whose_graph_gives_no_layer_inputs_is_not_served(target, without_inputs, kind, layout):
    head = head_of(target, kind)
    for base, loads in ((target.file, True), (without_inputs, False), ("org/unknown", True)):
        head.config.base_model_name_or_path = base
        listed = [
            each for each in layout_of(layout, head).servers(head.config, "D") if each.name.startswith("llama.cpp")
        ]
        assert [each.loads for each in listed] == [loads]
        assert ("gemma3" in listed[0].how) is not loads


def test_a_target_in_safetensors_has_the_architecture_that_the_converter_gives_it(target, tmp_path):
    for name, model_type in (("served", "llama"), ("not", "qwen2")):
        config = {**json.loads(target.config.to_json_string()), "model_type": model_type}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert refusal(LLAMA_CPP, str(tmp_path / "served")) is None
    assert "qwen2" in refusal(LLAMA_CPP, str(tmp_path / "not"))


def test_a_server_without_gguf_gets_the_folder_of_dequantised_weights(target):
    head = head_of(target, "eagle3")
    head.config.base_model_name_or_path = "my models/q.gguf"
    (vllm,) = (each for each in layout_of("eagle3", head).servers(head.config, "D") if each.name.startswith("vLLM"))
    write, serve = vllm.how.split(", then ")
    assert shlex.split(write) == ["speculator", "dequantise", "--target", "my models/q.gguf", "--output", "my models/q"]
    assert shlex.split(serve)[:3] == ["vllm", "serve", "my models/q"]


@torch.no_grad()
def test_dequantised_weights_are_a_folder_that_transformers_loads(target, tmp_path, capsys):
    given = Target.load(target.file)
    text, output = "<|im_end|>  def f(x):\n\treturn 12", tmp_path / "out"
    assert main(["dequantise", "--target", target.file, "--output", str(output)]) == 0
    tokenizer, model = AutoTokenizer.from_pretrained(output), AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    expected = {name: weight.to(torch.bfloat16) for name, weight in given.model.state_dict().items()}
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    assert tokenizer(text)["input_ids"] == given.tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == given.tokenizer.chat_template
    assert set(GenerationConfig.from_pretrained(output).eos_token_id) == given.eos_token_ids
    assert not hasattr(model.config, "quantization_config")
    assert same_target(Target.load(str(output)).fingerprint, given.fingerprint)
    head = head_of(target, "eagle3", fc_norm=True)
    save(head, tmp_path / "native", layout_of("native", head))
    flags = ["--speculator", str(tmp_path / "native"), "--format", "speculators", "--output", str(tmp_path / "spec")]
    assert main(["export", *flags, "--base_model", str(output)]) == 0
    capsys.readouterr()
    flags[-1] += "2"
    assert main(["export", *flags, "--base_model", target.file]) == 2
    assert "speculator dequantise" in capsys.readouterr().err
    assert main(["dequantise", "--target", target.file, "--output", str(output)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["dequantise", "--target", str(output), "--output", str(tmp_path / "more")]) == 2
    assert "not a GGUF file" in capsys.readouterr().err
