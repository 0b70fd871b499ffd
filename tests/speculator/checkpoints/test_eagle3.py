import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import edit, edit_tensors, refused
from conftest import tiny_block_head
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3Config, Gemma2Config, GptOssConfig, LlamaConfig, LlamaForCausalLM

from speculator import HeadDrafter, Sampling, Target, UserError, generate
from speculator.__main__ import main
from speculator.checkpoints import layout_of, load_any, recognise, save
from speculator.checkpoints.layers import AUX_LAYERS
from speculator.checkpoints.loading import load_head
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig
from speculator.target.fingerprint import fingerprint

V, D = 23, 8
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 64}
KINDS = {
    "3.1": {},
    "3": {"fc_norm": False, "norm_output": False},
    "speculators": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "sliding_window": 16},
    "whole": {"draft_vocab_size": None, "aux_layers": None},
    "yarn": {"rope_parameters": YARN, "attention_bias": True, "aux_layers": [1, 3], "max_position_embeddings": 128},
    "qwen3": {"qk_norm": True},
    "qwen3 with a window": {"qk_norm": True, "sliding_window": 2},
    "own": {"own_embedding": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A target of the heads' sizes."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"vocab_size": V, "hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2)).save_pretrained(folder)
    return folder


@pytest.fixture
def head(base) -> Eagle3Speculator:
    return head_of(base)


def head_of(base: Path, dtype: torch.dtype = torch.float32, **changes) -> Eagle3Speculator:
    torch.manual_seed(1)
    shape = {"vocab_size": V, "emb_dim": D, "inner_dim": 12, "n_predict": 3, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 4, "aux_layers": [2, 4, 5], "draft_vocab_size": 5}
    shape |= {"base_model_name_or_path": str(base)}
    head = Eagle3Speculator(Eagle3SpeculatorConfig(**shape | changes))
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.0 if "bias" in name else 1.0, std=0.2)
    if head.draft_tokens is not None:
        head.draft_tokens.copy_(torch.tensor([1, 4, 9, 16, 22]))
    return head.to(dtype)


FLAT, SPECULATORS, NATIVE = ("eagle3", "speculators", "native")


def write(head: Eagle3Speculator, folder: Path, name: str) -> Path:
    save(head, folder, layout_of(name, head))
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_function(a: Eagle3Speculator, b: Eagle3Speculator) -> bool:
    inputs = a.probe()
    if a.config.own_embedding:
        inputs = inputs[:2]
    return torch.equal(a.logits(*inputs), b.logits(*inputs))


# --- there and back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_keep_every_bit(tmp_path, base, dtype, kind):
    head = head_of(base, dtype, **KINDS[kind])
    head.save_pretrained(tmp_path / "0")
    for i, name in enumerate((FLAT, SPECULATORS, FLAT, NATIVE), start=1):
        write(load_any(tmp_path / str(i - 1)), tmp_path / str(i), name)
        assert recognise(tmp_path / str(i)).name == name
    again = Eagle3Speculator.from_pretrained(tmp_path / "4")
    assert again.dtype == dtype
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in head.state_dict().items())
    assert same_function(load_any(tmp_path / "4"), head)
    ours, theirs = head.config.to_dict(), again.config.to_dict()
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing <= {"dtype", "architectures", "_name_or_path"}


def test_the_flat_layout_is_a_llama_config_with_two_forms_of_aux_layers_and_rope(tmp_path, base):
    folder = write(head_of(base, torch.bfloat16, rope_parameters=YARN), tmp_path / "flat", FLAT)
    config = config_of(folder)
    assert config.pop("transformers_version")
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": D,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": V,
        "draft_vocab_size": 5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        "rope_parameters": YARN,
        "rope_theta": 500.0,
        "rope_scaling": {name: value for name, value in YARN.items() if name != "rope_theta"},
        "ttt_length": 3,
        "base_model_name_or_path": str(base),
    }
    layer = AutoConfig.from_pretrained(folder)  # as SGLang and vLLM do first
    assert isinstance(layer, LlamaConfig)
    assert layer.rope_parameters == YARN


def test_the_flat_layout_has_its_published_tensors(tmp_path, head):
    tensors = tensors_of(write(head, tmp_path / "flat", FLAT))
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [D, 3 * D],
        **{f"fc_norm.{i}.weight": [D] for i in range(3)},
        "midlayer.input_layernorm.weight": [D],
        "midlayer.hidden_norm.weight": [D],
        "midlayer.post_attention_layernorm.weight": [D],
        "midlayer.self_attn.q_proj.weight": [16, 2 * D],
        "midlayer.self_attn.k_proj.weight": [8, 2 * D],
        "midlayer.self_attn.v_proj.weight": [8, 2 * D],
        "midlayer.self_attn.o_proj.weight": [D, 16],
        "midlayer.mlp.gate_proj.weight": [12, D],
        "midlayer.mlp.up_proj.weight": [12, D],
        "midlayer.mlp.down_proj.weight": [D, 12],
        "norm.weight": [D],
        "lm_head.weight": [5, D],
        "d2t": [5],
        "t2d": [V],
    }
    assert tensors["d2t"].tolist() == [1, 3, 7, 13, 18]  # token - place
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [1, 4, 9, 16, 22]


def test_the_speculators_layout_has_its_published_config_and_the_embedding(tmp_path, base, head):
    folder = write(head, tmp_path / "out", SPECULATORS)
    config = config_of(folder)
    assert config.pop("transformers_version")
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "float32",
        "draft_vocab_size": 5,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": str(base), "architectures": ["LlamaForCausalLM"]},
        },
        "base_model_name_or_path": str(base),
    }
    assert layer["model_type"] == "llama"
    assert layer["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    stored, embedding = tensors_of(folder), tensors_of(base)["model.embed_tokens.weight"]
    assert torch.equal(stored["embed_tokens.weight"], embedding)
    assert "layers.0.self_attn.q_proj.weight" in stored
    again = load_any(folder)
    assert torch.equal(again.embedding_weight, embedding)
    assert not again.config.own_embedding


def test_a_shared_embedding_needs_no_base(tmp_path, base, head):
    head.config.base_model_name_or_path = "nobody/nothing"
    with pytest.raises(UserError, match="nobody/nothing"):
        write(head, tmp_path / "out", SPECULATORS)
    assert not (tmp_path / "out").exists()
    head.share_embedding(torch.ones(V, D))
    assert tensors_of(write(head, tmp_path / "out", SPECULATORS))["embed_tokens.weight"].eq(1).all()


def test_a_base_of_other_sizes_or_without_the_tensor_is_refused(tmp_path, base, head):
    other = tmp_path / "base"
    LlamaConfig.from_pretrained(base).save_pretrained(other)
    head.config.base_model_name_or_path = str(other)
    with pytest.raises(UserError, match="none in safetensors files"):
        write(head, tmp_path / "out", SPECULATORS)
    save_file({"model.norm.weight": torch.zeros(D)}, other / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight"):
        write(head, tmp_path / "out", SPECULATORS)
    save_file({"model.embed_tokens.weight": torch.zeros(V, D + 1)}, other / "model.safetensors")
    with pytest.raises(UserError, match=r"\[23, 8\]"):
        write(head, tmp_path / "out", SPECULATORS)


def test_the_embedding_is_that_of_the_target_that_the_head_was_trained_for(tmp_path, base, head, capsys):
    """Other weights of the same sizes are not stored, nor an adapter's in the same folder, nor an MTP layer's."""
    head.config.base_model_fingerprint = fingerprint(LlamaForCausalLM.from_pretrained(base))
    other, adapted = tmp_path / "other", tmp_path / "adapted"
    for folder in (other, adapted):
        shutil.copytree(base, folder)
    edit_tensors(other, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.randn(V, D)}))
    head.config.base_model_name_or_path = str(other)
    with pytest.raises(UserError, match="other weights than the head was trained for"):
        write(head, tmp_path / "out", SPECULATORS)
    assert not (tmp_path / "out").exists()
    head.save_pretrained(tmp_path / "mine")
    for folder, differs in ((base, False), (other, True)):
        capsys.readouterr()
        flags = ["--speculator", str(tmp_path / "mine"), "--format", "eagle3", "--base_model", str(folder)]
        assert main(["export", *flags, "--output", str(tmp_path / f"flat-{folder.name}")]) == 0
        assert ("not the weights that the head was trained for" in capsys.readouterr().out) is differs

    embedding = tensors_of(base)["model.embed_tokens.weight"]
    save_file({"base_model.model.model.embed_tokens.weight": embedding + 1}, adapted / "adapter_model.safetensors")
    edit_tensors(adapted, lambda tensors: tensors.update({"model.layers.2.embed_tokens.weight": embedding + 1}))
    head.config.base_model_name_or_path = str(adapted)
    stored = tensors_of(write(head, tmp_path / "out", SPECULATORS))
    assert torch.equal(stored["embed_tokens.weight"], embedding)


# --- what others wrote


def test_a_head_published_by_eagle_is_read(tmp_path, base, monkeypatch):
    """Without auxiliary layers, rope_parameters and flags; the layer and the class under other names; a pickle."""
    head = head_of(base, fc_norm=False, norm_output=False, aux_layers=None, head_dim=2)
    folder = write(head, tmp_path / "flat", FLAT)
    added = ("rope_parameters", "ttt_length", "head_dim", "norm_before_residual", "norm_before_fc", "fc_norm")
    edit(folder, lambda config: [config.pop(name) for name in (*added, "norm_output")])
    edit(folder, lambda config: config.update(architectures=["LlamaForCausalLM"]))
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors_of(folder).items()}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load, devices = torch.load, []
    monkeypatch.setattr(torch, "load", lambda file, device, **how: devices.append(device) or load(file, device, **how))
    again = load_any(folder)
    assert devices == ["meta", "cpu"], "the values are read once"
    assert again.config.n_predict == 7
    again.config.n_predict = 3
    assert same_function(again, head)


def test_a_head_without_t2d_is_read(tmp_path, head):
    """As NVIDIA's ModelOpt writes them: t2d follows from d2t."""
    folder = write(head, tmp_path / "flat", FLAT)
    edit_tensors(folder, lambda tensors: tensors.pop("t2d"))
    assert same_function(load_any(folder), head)


@pytest.mark.parametrize(
    ("ids", "nested", "aux_layers"),
    [([2, 4, 5], None, [2, 4, 5]), (None, [1, 3, 4], [2, 4, 5]), ([2, 4, 5], [1, 3, 4], [2, 4, 5]), (None, None, None)],
)
def test_aux_layers_are_read_from_either_key(tmp_path, head, ids, nested, aux_layers):
    folder = write(head, tmp_path / "flat", FLAT)
    name = "eagle_aux_hidden_state_layer_ids"
    edit(folder, lambda config: config.update({name: ids, "eagle_config": {name: nested}}))
    assert load_any(folder).config.aux_layers == aux_layers


def test_a_head_of_the_whole_vocabulary_is_read_with_a_null_size_and_with_tables(tmp_path, base):
    head = head_of(base, draft_vocab_size=None)
    folder = write(head, tmp_path / "flat", FLAT)
    assert config_of(folder)["draft_vocab_size"] == V
    edit_tensors(folder, lambda t: t.update(d2t=torch.zeros(V, dtype=torch.int64), t2d=torch.ones(V, dtype=torch.bool)))
    assert load_any(folder).config.draft_vocab_size is None
    edit(folder, lambda config: config.update(draft_vocab_size=None))
    assert same_function(load_any(folder), head)
    edit(folder, lambda config: config.pop("draft_vocab_size"))
    assert same_function(load_any(folder), head)
    edit_tensors(folder, lambda t: t["t2d"].fill_(False))
    assert "d2t" in refused(folder)
    edit_tensors(folder, lambda t: [t.pop("t2d"), t["d2t"].copy_(torch.arange(V).flip(0) - torch.arange(V))])
    assert "d2t" in refused(folder)


def test_an_embedding_in_the_flat_layout_is_the_heads_own(tmp_path, head):
    """vLLM keeps it; SGLang does not, which `servers` reports."""
    folder = write(head, tmp_path / "flat", FLAT)
    own = torch.randn(V, D)
    edit_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    again = load_any(folder)
    assert again.config.own_embedding
    assert torch.equal(again.embedding_weight, own)
    assert not again.embed_tokens.weight.requires_grad
    loaders = {server.name: server for server in layout_of(FLAT, again).servers(again.config, "D")}
    assert loaders["vLLM 0.32 and 0.33"].loads
    assert not loaders["SGLang 0.5.23"].loads
    assert "an embedding of its own" in loaders["SGLang 0.5.23"].how


def test_an_embedding_of_zeros_is_ignored(tmp_path, head):
    """The library stores zeros if it has no embedding."""
    folder = write(head, tmp_path / "out", SPECULATORS)
    edit_tensors(folder, lambda tensors: tensors["embed_tokens.weight"].zero_())
    assert load_any(folder).embedding_weight is None
    edit_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert load_any(folder).embedding_weight is None


def test_a_layer_config_without_default_fields_is_read(tmp_path, base):
    """The library writes only what differs from transformers' defaults."""
    head = head_of(base, num_key_value_heads=4)
    folder = write(head, tmp_path / "out", SPECULATORS)

    def as_there(config):
        config["architectures"] = ["Eagle3DraftModel"]
        for name in ("num_key_value_heads", "hidden_act", "rms_norm_eps", "rope_parameters", "attention_bias"):
            config["transformer_layer_config"].pop(name)

    edit(folder, as_there)
    assert same_function(load_any(folder), head)


# --- errors


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(12, D)}), "midlayer."),
        (lambda t: t.update({"fc.weight": torch.zeros(D, 2 * D)}), "fc.weight is [8, 16], config.json says [8, 24]"),
        (lambda t: t.pop("d2t"), "d2t"),
        (lambda t: [t.pop("d2t"), t.pop("t2d")], "d2t"),
        (lambda t: t["t2d"].fill_(True), "d2t and t2d"),
        (lambda t: t["d2t"].add_(1), "d2t"),
        (lambda t: t.update(d2t=t["d2t"][[1, 0, 2, 3, 4]]), "d2t"),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(V, D + 1)}), "embed_tokens.weight is [23, 9]"),
    ],
)
def test_a_wrong_tensor_fails_in_one_line(tmp_path, head, change, name):
    folder = write(head, tmp_path / "flat", FLAT)
    edit_tensors(folder, change)
    assert name in refused(folder)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"fc_norm": 1}, "fc_norm"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, "[2, 4, 5]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 4], "eagle_config": None}, "distinct"),
        ({"eagle_aux_hidden_state_layer_ids": "2", "eagle_config": None}, "aux_layers"),
        ({"num_key_value_heads": 3}, "multiple of 3"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}}, "dynamic"),
        ({"eagle_config": [1]}, "malformed"),
        ({"target_layer_ids": [1, 3, 4]}, "target_layer_ids is not read in an EAGLE-3 head"),
        ({"aux_hidden_state_layer_ids": [2, 4, 5]}, "aux_hidden_state_layer_ids is not read in an EAGLE-3 head"),
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5, and 3 layers are named"),
        ({"torch_dtype": "fp16"}, "fp16"),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "yarn"}}, "factor"),
    ],
)
def test_a_wrong_flat_config_fails_in_one_line(tmp_path, head, change, key):
    folder = write(head, tmp_path / "flat", FLAT)
    edit(folder, lambda config: config.update(change))
    assert key in refused(folder)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda c: c.update(speculators_model_type="peagle"), "speculators_model_type"),
        (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
        (lambda c: c.pop("speculators_config"), "speculators_config"),
        (lambda c: c["speculators_config"].update(proposal_methods=[]), "malformed"),
        (lambda c: c.pop("norm_before_residual"), "norm_before_residual"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[2, 4, 5]), "aux_hidden_state_layer_ids is not read"),
    ],
)
def test_a_wrong_speculators_config_fails_in_one_line(tmp_path, head, change, key):
    folder = write(head, tmp_path / "out", SPECULATORS)
    edit(folder, change)
    assert key in refused(folder)


def test_a_rope_without_its_factor_fails_in_one_line(tmp_path, base):
    folder = write(head_of(base, rope_parameters=YARN), tmp_path / "native", NATIVE)
    edit(folder, lambda config: config["rope_parameters"].pop("factor"))
    assert "factor" in refused(folder)


def test_a_damaged_base_model_fails_in_one_line(tmp_path, head, base):
    copied = Path(shutil.copytree(base, tmp_path / "base"))
    os.truncate(copied / "model.safetensors", 100)
    head.config.base_model_name_or_path = str(copied)
    with pytest.raises(UserError, match="damaged"):
        write(head, tmp_path / "out", SPECULATORS)


def test_a_missing_trained_embedding_is_refused(tmp_path, base):
    folder = write(head_of(base, own_embedding=True), tmp_path / "out", SPECULATORS)
    edit_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert "embed_tokens.weight" in refused(folder)


# --- the commands


def test_inspect_export_and_card_describe_the_head(tmp_path, base, capsys):
    head_of(base, torch.bfloat16).save_pretrained(tmp_path / "mine")
    out, form = tmp_path / "out", "3 steps, 4 heads of 4 over 2, aux layers 2 4 5, fc_norm, norm_output"
    flags = ["--speculator", str(tmp_path / "mine"), "--format", "speculators", "--output", str(out)]
    assert main(["export", *flags]) == 0
    shown = capsys.readouterr().out
    assert "loads in vLLM 0.32 and 0.33: vllm serve" in shown
    assert "DOES NOT LOAD in SGLang" in shown
    card = (out / "README.md").read_text()
    assert f"| form | {form} |" in card
    assert "[eagle3]\nloads in vLLM" in card
    assert main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    for fact in ("speculators (Eagle3Speculator)", form, "5 of 23 tokens", "eagle3: for vLLM 0.32 and 0.33; SGLang"):
        assert fact in shown


@pytest.mark.parametrize(("name", "server"), [(FLAT, "vLLM"), (SPECULATORS, "vLLM"), (FLAT, "SGLang")])
@pytest.mark.parametrize(("target", "loads"), [(Gemma2Config(), False), (LlamaConfig(), True), (None, True)])
def test_servers_run_no_head_of_a_target_that_gives_them_no_hidden_states(tmp_path, base, name, server, target, loads):
    if target is not None:
        target.save_pretrained(tmp_path)
    config = head_of(base, base_model_name_or_path=str(tmp_path) if target else "org/unknown").config
    (found,) = (each for each in layout_of(name, head_of(base)).servers(config, "D") if each.name.startswith(server))
    assert found.loads is loads
    assert ("gemma2" in found.how) is not loads
    assert ("by its source" in found.verdict) == (loads and server == "SGLang")


@pytest.mark.parametrize(
    ("target", "aux_layers", "ids"),
    [
        (LlamaConfig, [3, 12, 21], [2, 11, 20]),
        (GptOssConfig, [3, 12, 21], [2, 11, 20]),
        (GptOssConfig, [3, 12, 24], [2, 11, 23]),
        (DeepseekV3Config, [2, 12, 21], [1, 11, 20]),
        (DeepseekV3Config, [3, 12, 21], [3, 12, 21]),
        (DeepseekV3Config, [1, 12, 21], None),
    ],
)
def test_sglangs_list_is_numbered_as_it_reads_it_for_the_target(tmp_path, base, target, aux_layers, ids):
    target(num_hidden_layers=24).save_pretrained(tmp_path / "target")
    head = head_of(base, aux_layers=aux_layers, base_model_name_or_path=str(tmp_path / "target"))
    folder = write(head, tmp_path / "flat", FLAT)
    assert config_of(folder)["eagle_config"].get(AUX_LAYERS) == ids
    (found,) = (each for each in layout_of(FLAT, head).servers(head.config, "D") if each.name.startswith("SGLang"))
    assert found.loads is (ids is not None)
    edit(folder, lambda config: config.pop(AUX_LAYERS))
    assert load_any(folder).config.aux_layers == (aux_layers if ids else None)
    if target is GptOssConfig:  # the target's 24 in the list shows that it holds k
        edit(folder, lambda config: config["eagle_config"].update({AUX_LAYERS: [3, 12, 24]}))
        assert load_any(folder).config.aux_layers == [3, 12, 24]


@pytest.mark.parametrize(("ids", "warned"), [([24, 30, 36], True), ([1, 11, 20], False)])
def test_a_numbering_that_depends_on_an_unknown_target_is_warned_of(tmp_path, base, caplog, ids, warned):
    folder = write(head_of(base, base_model_name_or_path="org/unknown"), tmp_path / "flat", FLAT)
    edit(folder, lambda config: config.update({AUX_LAYERS: None, "eagle_config": {AUX_LAYERS: ids}}))
    assert load_any(folder).config.aux_layers == [k + 1 for k in ids]
    assert (f"{ids} in eagle_config is read as the outputs" in caplog.text) is warned
    edit(folder, lambda config: config.update({AUX_LAYERS: ids}))
    assert load_any(folder).config.aux_layers == ids
    edit(folder, lambda config: config["eagle_config"].update(aux_layer_ids=ids))
    load_any(folder)
    assert "aux_layer_ids in eagle_config not read" in caplog.text


def test_a_head_whose_number_of_heads_no_llama_config_can_have_is_not_exported(tmp_path, base):
    head = head_of(base, num_attention_heads=3, num_key_value_heads=1)  # the hidden size is 8
    for name in (FLAT, SPECULATORS):
        assert not layout_of(name, head).stores(head)
        with pytest.raises(UserError, match="a multiple of the 3 attention heads; it is 8"):
            write(head, tmp_path / name, name)
    assert layout_of(FLAT, head).stores(head_of(base, num_attention_heads=3, num_key_value_heads=1, qk_norm=True))


@pytest.fixture(scope="module")
def target(base) -> Target:
    return Target(LlamaForCausalLM.from_pretrained(base), tokenizer=None)


@pytest.mark.parametrize("changes", [{}, {"own_embedding": True, "draft_vocab_size": None}], ids=["shared", "own"])
def test_a_head_of_any_layout_drafts_the_same(tmp_path, base, target, changes):
    head = head_of(base, **changes)
    made, ends = [], {"max_new_tokens": 12, "eos_token_ids": ()}
    for name in (NATIVE, FLAT, SPECULATORS):
        loaded = load_head(write(head, tmp_path / name, name), target)
        assert loaded.config.own_embedding == head.config.own_embedding
        made.append(generate(target, HeadDrafter(loaded, 3), [[1, 2, 3], [4]], Sampling(1.0), **ends))
    assert made[0].tokens == made[1].tokens == made[2].tokens
    assert made[0].steps == made[1].steps == made[2].steps
    assert made[0].acceptance_length > 1


def test_a_head_without_aux_layers_reads_the_servers_default(tmp_path, base, target):
    folder = write(head_of(base, aux_layers=None), tmp_path / "flat", FLAT)
    assert load_head(folder, target).aux_layers == (2, 4, 5)


@pytest.mark.parametrize("name", ["model.gguf", "some/folder/model.gguf"])
def test_a_gguf_target_has_no_embedding_to_export(tmp_path, base, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("speculator.checkpoints.base_model.base_config", lambda name: AutoConfig.from_pretrained(base))
    head = head_of(base)
    head.config.base_model_name_or_path = name
    head.save_pretrained(tmp_path / "mine")
    capsys.readouterr()
    assert main(["export", "--speculator", "mine", "--format", "speculators", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "GGUF" in error
    assert not (tmp_path / "out").exists()


ODD = [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"is_neox_style": False}, "is_neox_style is False"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
]


@pytest.mark.parametrize(("change", "message"), ODD)
@pytest.mark.parametrize("name", [FLAT, SPECULATORS, "dflash", "dspark", "transformers"])
def test_a_layer_that_computes_something_else_is_refused(tmp_path, base, target, name, change, message):
    dflash = {"markov_rank": 0, "sample_from_anchor": False, "confidence_head": False}
    block = name in ("dflash", "dspark", "transformers")
    head = tiny_block_head(target, aux_layers=[1], **({} if name == "dspark" else dflash)) if block else head_of(base)
    folder = write(head, tmp_path / "out", name)

    def edited(content):
        content.get("transformer_layer_config", content).update(change)

    edit(folder, edited)
    assert message in refused(folder)


def test_a_native_head_with_a_partial_rope_is_refused(tmp_path, base):
    folder = write(head_of(base), tmp_path / "out", NATIVE)
    edit(folder, lambda content: content["rope_parameters"].update(partial_rotary_factor=0.5))
    assert "partial_rotary_factor is 0.5" in refused(folder)


def test_a_field_that_is_not_read_is_named(tmp_path, base, caplog):
    folder = write(head_of(base), tmp_path / "out", FLAT)
    load_any(folder)
    assert not caplog.messages
    edit(folder, lambda content: content.update(new_trick=2, initializer_range=0.1, bos_token_id=1))
    load_any(folder)
    assert ["new_trick" in message for message in caplog.messages] == [True]
    assert "bos_token_id" not in caplog.text
