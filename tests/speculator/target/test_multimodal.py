"""Checkpoints with a vision tower generate text as the class that saved them."""

import json

import httpx
import pytest
import torch
from chat_templates import chat_tokenizer
from conftest import RECURRENT_RUNS, tiny_head
from multimodal_targets import CONFIGS, save_multimodal
from safetensors import safe_open
from serving_here import serving

from speculator import HeadDrafter, Target, generate
from speculator.__main__ import main
from speculator.checkpoints.eagle3 import EMBEDDING
from speculator.checkpoints.loading import bind
from speculator.heads import DSparkSpeculator, Eagle3Speculator

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11, 12], list(range(20, 57)), [3]]


def texts_of(model, prompts=PROMPTS, count=24) -> list[list[int]]:
    """Greedy continuations by transformers, one prompt at a time."""
    model.float()
    made = [model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0] for prompt in prompts]
    return [row[len(prompt) :].tolist() for prompt, row in zip(prompts, made, strict=True)]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[RECURRENT_RUNS] * (name == "qwen3_5")) for name in CONFIGS]
)
def test_greedy_text_is_that_of_the_multimodal_class(family, tmp_path):
    model = save_multimodal(family, tmp_path)
    target = Target.load(str(tmp_path))
    head = HeadDrafter(tiny_head(vocab_size=target.vocab_size))  # random, so nearly every draft is rejected
    ends = model.generation_config.eos_token_id or ()  # transformers knows no end of the tokenizer's
    assert generate(target, head, PROMPTS, max_new_tokens=24, eos_token_ids=ends).tokens == texts_of(model)


def test_the_vision_tower_takes_no_memory(tmp_path):
    model = save_multimodal("qwen3_vl", tmp_path)
    loaded = Target.load(str(tmp_path)).model
    tower = sum(weight.numel() for weight in model.get_encoder("image").parameters())
    assert loaded.num_parameters() < model.num_parameters() - 0.9 * tower


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=RECURRENT_RUNS)])
def test_exports_name_the_multimodal_checkpoint_and_have_the_sizes_of_its_text_side(family, tmp_path):
    """Servers load the target by its own class, and the head as one that reads text positions."""
    folder = tmp_path / "target"
    whole = save_multimodal(family, folder)
    target = Target.load(str(folder))
    shape = {"inner_dim": 32, "n_predict": 3, "aux_layers": [1, 2, 3], "base_model_name_or_path": str(folder)}
    exports = {}
    for head_class in (Eagle3Speculator, DSparkSpeculator):
        head = bind(head_class(head_class.config_class.for_target(target.config, **shape)), target)
        own = head.config.model_type.split("_")[0]
        head.save_pretrained(tmp_path / own)
        for layout in (own, "speculators"):
            output = tmp_path / f"{own}-{layout}"
            flags = ["--speculator", str(tmp_path / own), "--format", layout, "--output", str(output)]
            assert main(["export", *flags]) == 0
            exports[own, layout] = config = json.loads((output / "config.json").read_text())
            layers = config.get("transformer_layer_config", config)
            assert layers["hidden_size"] == target.hidden_size
            assert layers["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    for own in ("eagle3", "dspark"):
        assert exports[own, own]["base_model_name_or_path"] == str(folder)
        verifier = exports[own, "speculators"]["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": str(folder), "architectures": [type(whole).__name__]}
    assert exports["dspark", "dspark"]["num_target_layers"] == target.config.num_hidden_layers
    with safe_open(tmp_path / "eagle3-speculators" / "model.safetensors", "pt") as stored:
        assert torch.equal(stored.get_tensor(EMBEDDING), target.model.get_input_embeddings().weight)


def test_the_server_answers_text_and_rejects_images_in_one_line(tmp_path):
    tokenizer = chat_tokenizer("qwen3")
    model = save_multimodal("gemma3", tmp_path, tokenizer)
    question = {"role": "user", "content": "Hi"}
    prompt = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
    image = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    with (
        serving(Target.load(str(tmp_path))) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        body = {"max_tokens": 16, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/chat/completions", json={"messages": [question], **body}).json()
        assert "choices" in answer, answer
        assert answer["choices"][0]["token_ids"] == texts_of(model, [prompt], 16)[0]
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [image]}]})
    assert refused.status_code == 400
    error = refused.json()["error"]["message"]
    assert "image_url" in error
    assert "\n" not in error
