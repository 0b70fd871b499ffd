"""Properties beyond the probe's short texts: sliding windows, and rotary factors that depend on the text length."""

import copy

import pytest
import torch
from conftest import _SHAPE, Oracle, tiny_head
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
)
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from speculator import HeadDrafter, Target, Tree, UserError, generate
from speculator.target.attention import attention
from speculator.target.probe import usable_context

_HEADS = {"head_dim": 8}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 4.0, 9.0, 16.0],
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAR = {
    "mistral": MistralConfig(**_SHAPE, sliding_window=24),
    "phi3": Phi3Config(**_SHAPE, sliding_window=24),
    "phimoe": PhimoeConfig(**_SHAPE, **_EXPERTS, sliding_window=24),
    "qwen2": Qwen2Config(**_SHAPE, use_sliding_window=True, max_window_layers=1, sliding_window=24),
    "gemma2": Gemma2Config(**_SHAPE, **_HEADS, sliding_window=24),
    "gemma3": Gemma3TextConfig(
        **_SHAPE, **_HEADS, sliding_window=24, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": GptOssConfig(**_SHAPE, **_HEADS, **_EXPERTS, sliding_window=24),
    "dynamic": LlamaConfig(
        **{**_SHAPE, "max_position_embeddings": 72},
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "longrope": Phi3Config(**_SHAPE, original_max_position_embeddings=72, rope_parameters=dict(_LONG)),
    "longrope, phimoe": PhimoeConfig(
        **_SHAPE,
        **_EXPERTS,
        rope_parameters={
            **_LONG,
            "short_mscale": 1.0,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 72,
        },
    ),
}
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(1, 32, (n,), generator=GENERATOR).tolist() for n in (3, 22, 61, 40)]


def model_of(config, scale: float = 4.0):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= scale
    return model.eval().to(torch.float32 if config.model_type in ("gpt_oss", "phimoe") else torch.float64)


def theirs(model, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAR)
def test_text_beyond_the_probe_equals_transformers(family):
    model = model_of(FAR[family])
    end = 72 if family == "dynamic" or family.startswith("longrope") else 128
    expected = [theirs(model, prompt, min(24, end - len(prompt))) for prompt in PROMPTS]
    row = torch.tensor([PROMPTS[2]])  # as in training
    with torch.no_grad():
        own = model(row, use_cache=False).logits
    target = Target(model, tokenizer=None)
    assert target.context_length == end
    head = tiny_head().to(model.dtype)
    for drafter in (None, Oracle(expected, prompts=PROMPTS), HeadDrafter(head, Tree((3, 2), 6))):
        assert generate(target, drafter, PROMPTS, max_new_tokens=24).tokens == expected
        assert generate(target, drafter, PROMPTS[2:3], max_new_tokens=24).tokens == expected[2:3]
    torch.testing.assert_close(target.logits(target.hidden(row)), own, atol=1e-4, rtol=1e-4)


def test_a_reduced_context_is_logged(caplog):
    Target(model_of(FAR["longrope"]), tokenizer=None)
    (line,) = caplog.messages
    assert "72" in line
    caplog.clear()
    target = Target(model_of(FAR["dynamic"]), tokenizer=None)
    assert not caplog.messages
    with pytest.raises(UserError, match="72"):
        generate(target, None, [[1] * 72])


def test_rotary_factors_that_follow_the_batch_are_refused(monkeypatch):
    monkeypatch.setattr("speculator.target.probe.original_context", lambda config: None)
    with pytest.raises(UserError, match="exactly"):
        Target(model_of(FAR["longrope"]), tokenizer=None)


def test_a_window_in_no_mask_is_refused(monkeypatch):
    monkeypatch.setattr("speculator.target.model.read_windows", lambda *_: {})
    with pytest.raises(UserError, match="24"):
        Target(model_of(FAR["phimoe"]), tokenizer=None)


@pytest.mark.parametrize("chunk", [24, 32])
def test_a_mask_of_another_form_is_refused(monkeypatch, chunk):
    def chunked(config, **given):
        config.attention_chunk_size = chunk
        return create_chunked_causal_mask(config=config, **given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", chunked)
    with pytest.raises(UserError, match="mask"):
        Target(model_of(LlamaConfig(**_SHAPE)), tokenizer=None)


def test_a_window_of_the_mask_alone_reaches_attention(monkeypatch):
    """PhiMoE passes no window to its layers."""

    def windowed(config, **given):
        config.sliding_window = 24
        return create_sliding_window_causal_mask(config=config, **given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    model = model_of(LlamaConfig(**_SHAPE))
    expected = theirs(model, PROMPTS[3], 30)
    target = Target(model, tokenizer=None)
    assert {attention.WINDOWS[layer.self_attn] for layer in model.model.layers} == {24}
    assert generate(target, None, [PROMPTS[3]], max_new_tokens=30).tokens == [expected]


@pytest.mark.parametrize(("stated", "context"), [(64, 256), (80, 256), (300, 300), (32, 32)])
def test_yarn_extends_the_context_that_the_config_states(stated, context):
    """Model cards tell users to add the scaling, and leave max_position_embeddings as it is."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(**{**_SHAPE, "max_position_embeddings": stated}, rope_parameters=rope)
    assert usable_context(config) == context
    config.rope_parameters["factor"] = None
    assert usable_context(config) == stated
