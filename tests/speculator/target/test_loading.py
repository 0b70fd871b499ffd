import builtins
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_folders import edit, edit_tensors
from conftest import CONFIGS, overflow_at, save_tiny, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from speculator import DraftModelDrafter, Sampling, Target, UserError, generate
from speculator.target.fingerprint import same_target
from speculator.target.loading import read_target, warn_if_untied

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11, 12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama and its tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), tiny_tokenizer(280)
    sizes = {name: value for name, value in CONFIGS["llama"].to_dict().items() if not name.startswith("rope")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes | {"vocab_size": len(tokenizer), "hidden_size": 64, "head_dim": 16}))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_text_is_transformers(target: Target, model) -> None:
    given = generate(target, None, PROMPTS, Sampling(), max_new_tokens=24)
    for prompt, tokens in zip(PROMPTS, given.tokens, strict=True):
        text = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0]
        assert tokens == text[len(prompt) :].tolist()
    with torch.no_grad():
        rows = torch.tensor(PROMPTS[:1])
        torch.testing.assert_close(target.logits(target.hidden(rows)), model(rows).logits, atol=1e-4, rtol=1e-4)


def test_a_revision_is_passed_on_and_named(folder, monkeypatch):
    asked = []

    def read(name, revision, *rest):
        asked.append((name, revision))
        return read_target(str(folder), None, *rest)

    monkeypatch.setattr("speculator.target.in_process.read_target", read)
    assert Target.load("org/name", revision="v2").name == "org/name --revision v2"
    assert asked == [("org/name", "v2")]


def quantise_fp8(folder, to):
    """A checkpoint in fp8 by blocks, as DeepSeek's and Qwen's are stored; returns the dequantised weights."""
    shutil.copytree(folder, to)
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight
        if "_proj" in name:
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.expand(1, 1).clone()
            meant[name] = stored[name].float() * scale
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return meant


def test_an_fp8_checkpoint_equals_transformers(folder, tmp_path):
    meant = quantise_fp8(folder, tmp_path / "fp8")
    target = Target.load(str(tmp_path / "fp8"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(meant)
    assert_text_is_transformers(target, model)
    plain = Target.load(str(folder))
    drafted = generate(plain, DraftModelDrafter(target, plain), PROMPTS, max_new_tokens=24)
    assert drafted.tokens == generate(plain, None, PROMPTS, max_new_tokens=24).tokens
    assert drafted.acceptance_length > 1


SCHEMES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "int8": {"load_in_8bit": True},  # which rounds activations too
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bitsandbytes_checkpoint_equals_transformers(folder, tmp_path, scheme):
    layers = pytest.importorskip("bitsandbytes").nn
    quantised = BitsAndBytesConfig(**SCHEMES[scheme])
    stored = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantised, dtype=torch.float32)
    stored.save_pretrained(tmp_path)
    tiny_tokenizer(280).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path))
    kind = {"nf4": layers.Linear4bit, "int8": layers.Linear8bitLt}[scheme]
    assert isinstance(target.model.model.layers[0].mlp.up_proj, kind)
    assert_text_is_transformers(target, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_a_quantised_checkpoint_names_the_package_that_it_needs(folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="gptqmodel"):
        Target.load(str(tmp_path / "awq"))


def fp8_with_scales(tensors):
    for name in [name for name in tensors if "_proj" in name]:
        tensors[f"{name}_scale"] = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / tensors[f"{name}_scale"]).to(torch.float8_e4m3fn)


def nvfp4(tensors):
    fp8_with_scales(tensors)
    tensors |= {
        name: weight[:, ::2].contiguous().view(torch.uint8) for name, weight in tensors.items() if weight.itemsize == 1
    }


def added(*names):
    return lambda tensors: tensors.update({name: torch.ones(64) for name in names})


@pytest.mark.parametrize(
    ("change", "entries", "messages"),
    [
        (fp8_with_scales, {"quantization_config": {"quant_method": "modelopt"}}, ("'modelopt'", "weight_scale", "13")),
        (nvfp4, {"quantization_config": {"quant_method": "modelopt"}}, ("'modelopt'", "down_proj.weight")),
        (fp8_with_scales, {}, ("weight_scale", "quantization_config")),
        (added("model.layers.0.self_attn.q_proj.bias"), {}, ("q_proj.bias",)),
        (added("model.layers.1.self_attn.q_norm.weight"), {}, ("q_norm.weight",)),
        (added("lm_head.bias"), {}, ("lm_head.bias",)),
        (added("model.layers.2.enorm.weight"), {}, ("layers.2.enorm",)),
    ],
)
def test_tensors_that_the_model_does_not_read_are_refused(folder, tmp_path, change, entries, messages):
    shutil.copytree(folder, tmp_path / "more")
    edit_tensors(tmp_path / "more", change)
    edit(tmp_path / "more", lambda config: config.update(entries))
    with pytest.raises(UserError) as refusal:
        Target.load(str(tmp_path / "more"))
    assert all(message in str(refusal.value) for message in messages)
    assert "\n" not in str(refusal.value)


def test_mtp_layers_and_vision_towers_need_no_reader(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "more")
    names = ("mtp.fc.weight", "model.mtp_block.0.weight", "model.layers.2.enorm.weight", "vision_tower.norm.weight")
    edit_tensors(tmp_path / "more", added(*names))
    edit(tmp_path / "more", lambda config: config.update(num_nextn_predict_layers=1))
    assert_text_is_transformers(Target.load(str(tmp_path / "more")), AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("token", [3, 7])  # of the probe's two kinds of texts
def test_float16_that_overflows_is_named(tmp_path, token):
    overflow_at(save_tiny("llama", tmp_path), token)
    with pytest.raises(UserError, match=r"not finite in float16.*bfloat16"):
        Target.load(str(tmp_path), dtype="float16")
    Target.load(str(tmp_path), dtype="bfloat16")


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    made = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
    )
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            weight.data *= 8
    made.save_pretrained(tmp_path_factory.mktemp("adapter"))
    return tmp_path_factory.getbasetemp() / "adapter0"


def test_text_with_an_adapter_equals_transformers(folder, adapter):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_adapter(str(adapter))
    target = Target.load(str(folder), adapter=str(adapter))
    assert_text_is_transformers(target, model)
    bare = Target.load(str(folder))
    assert generate(target, None, PROMPTS, max_new_tokens=24).tokens != generate(bare, None, PROMPTS).tokens
    assert target.name == f"{folder} --adapter {adapter}"
    assert not same_target(target.fingerprint, bare.fingerprint)
    assert same_target(target.fingerprint, Target.load(str(folder), adapter=str(adapter)).fingerprint)


KINDS = {
    "dora": {"use_dora": True},
    "tokens": {"trainable_token_indices": [5, 6]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_text_with_any_adapter_equals_peft(folder, tmp_path, kind, tied):
    peft = pytest.importorskip("peft")
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    edit(base, lambda config: config.update(tie_word_embeddings=tied))
    if tied:
        edit_tensors(base, lambda tensors: tensors.pop("lm_head.weight"))
    given = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **KINDS[kind]})
    made = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), given)
    torch.manual_seed(1)
    for weight in made.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    made.save_pretrained(tmp_path / "adapter")
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    bare, target = Target.load(str(base)), Target.load(str(base), adapter=str(tmp_path / "adapter"))
    assert bare.fingerprint != target.fingerprint
    rows = torch.tensor(PROMPTS[:1])
    own = target.logits(target.hidden(rows))
    torch.testing.assert_close(own, expected.eval()(rows).logits, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(own, bare.logits(bare.hidden(rows)), atol=1e-2)


@pytest.mark.parametrize("kind", ["added tokens", "virtual tokens"])
def test_an_adapter_that_changes_the_model_is_refused_with_the_reason(folder, tmp_path, kind):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folder)
    given, message = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "virtual tokens"
    if kind == "added tokens":
        model.resize_token_embeddings(300)
        given, message = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), "added tokens"
    peft.get_peft_model(model, given).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        Target.load(str(folder), adapter=str(tmp_path))


def test_an_adapter_that_does_not_fit_fails_in_one_line(folder, adapter, tmp_path):
    for name in ("of_another_size", "half"):
        shutil.copytree(adapter, tmp_path / name)
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = dict(list(weights.items())[1:])
    save_file(kept, tmp_path / "half" / "adapter_model.safetensors")
    wider = {name: torch.cat([weight, weight], int("lora_A" in name)) for name, weight in weights.items()}
    save_file(wider, tmp_path / "of_another_size" / "adapter_model.safetensors")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("of_another_size", r"lora_[AB]\S* has shape"),
        ("half", r"half.*lora_A"),
        ("empty", r"adapter_config\.json"),
        ("missing", "adapter"),
    ):
        with pytest.raises(UserError, match=message) as refusal:
            Target.load(str(folder), adapter=str(tmp_path / name))
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="makes it an adapter"):
        Target.load(str(adapter))


def test_adapters_need_their_package(folder, tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text("{}")
    original = builtins.__import__

    def without(name, *rest, **named):
        if name.split(".")[0] == "peft":
            raise ImportError(name)
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install peft"):
        Target.load(str(folder), adapter=str(tmp_path))


def test_remote_code_runs_only_if_trusted(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class Mine(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    config = json.loads((own / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}}
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="--trust_remote_code"):
        Target.load(str(own))
    assert not (tmp_path / "ran").exists()
    target = Target.load(str(own), trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert_text_is_transformers(target, AutoModelForCausalLM.from_pretrained(folder))


def test_a_config_that_does_not_say_whether_it_ties_is_loaded():
    """As that of audio models, and configs with code of their own."""
    warn_if_untied(SimpleNamespace(config=SimpleNamespace(), get_output_embeddings=lambda: None), "name")


def test_autocast_is_named_before_the_logits_are_compared(target_folder):
    for load in (Target.load, lambda folder: Target(AutoModelForCausalLM.from_pretrained(folder), None)):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match=r"under torch\.autocast"):
            load(target_folder)
