import json
import shutil

import pytest
import torch
from conftest import CONFIGS, tiny_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    FalconConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from speculator import Target, UserError
from speculator.target import packed as documents
from speculator.target.attention import attention
from speculator.target.attention.attention import VARLEN
from speculator.target.in_process import InProcessTarget

TOKENS = torch.randint(0, 32, (2, 20), generator=torch.Generator().manual_seed(0))
SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_of_hidden_states_are_the_models_own(family):
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True)
        last = expected.hidden_states[-1]
        if family == "gemma3n":  # its hidden_states are four streams
            last = model.base_model(TOKENS).last_hidden_state
    target = Target(model, tokenizer=None)
    hidden = target.hidden(TOKENS)
    torch.testing.assert_close(hidden, last, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(hidden), expected.logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_documents_do_not_see_each_other(family):
    target = Target(tiny_model(family), tokenizer=None)
    assert target.document_attention[1] is (documents.masked if family == "gpt_oss" else documents.packed)
    packed = target.hidden(TOKENS, torch.tensor([[0] * 9 + [1] * 3 + [2] * 8, [4] * 20]))
    for row, start, stop in ((0, 0, 9), (0, 9, 12), (0, 12, 20), (1, 0, 20)):
        alone = target.hidden(TOKENS[row : row + 1, start:stop])[0]
        torch.testing.assert_close(packed[row, start:stop], alone, atol=1e-4, rtol=1e-5)
    together = target.hidden(TOKENS)
    assert not torch.allclose(packed[0, 12:], together[0, 12:], atol=1e-3)
    torch.testing.assert_close(packed[1], together[1], atol=1e-4, rtol=1e-5)


def test_soft_capped_attention_is_never_that_of_torch_which_lacks_it(monkeypatch):
    """transformers 5.17 gives Gemma 2 torch's attention; later ones know better."""
    model = tiny_model("gemma2")
    monkeypatch.setattr(type(model), "_supports_sdpa", True)
    model.set_attn_implementation("eager")
    expected = model(TOKENS).logits
    model.set_attn_implementation("sdpa")
    target = Target(model, tokenizer=None)
    assert target.original_attention == "eager"
    torch.testing.assert_close(target.logits(target.hidden(TOKENS)), expected, atol=1e-4, rtol=1e-5)


def test_training_uses_the_models_own_attention(monkeypatch):
    target, calls = Target(tiny_model(), tokenizer=None), []

    def spied(module, query, key, value, attention_mask, **given):
        calls.append(None if attention_mask is None else attention_mask.shape)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", spied)
    target.hidden(TOKENS)
    assert calls == [None] * 2  # causal by a flag
    target.hidden(TOKENS, torch.zeros_like(TOKENS))
    assert calls == [None] * 4
    target.hidden(TOKENS, torch.arange(20).expand(2, -1) // 6)
    assert calls == [None] * 4 + [(2, 1, 20, 20)] * 2
    cache = target.cache(2, 20)
    target.extend(cache, TOKENS)
    assert len(calls) == 6
    with pytest.raises(IndexError):
        target.hidden(TOKENS + 32)
    target.extend(cache, TOKENS[:, :1])
    assert len(calls) == 6


@pytest.mark.parametrize("layout", [documents.packed, documents.in_one_row, documents.masked])
def test_all_document_layouts_give_the_same_hidden_states(target, layout):
    rows = torch.tensor([[3] * 7 + [5] + [4] * 12, [2] * 20])
    expected = target.hidden(TOKENS, rows)
    target.document_attention = "sdpa", layout
    torch.testing.assert_close(target.hidden(TOKENS, rows), expected, atol=1e-4, rtol=1e-5)


def test_documents_that_masks_cannot_separate_have_rows_of_their_own(monkeypatch):
    """A family whose masks ignore positions and attention_mask."""

    def blind(position_ids, attention_mask, **given):
        return create_causal_mask(attention_mask=None, **given)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", blind)
    target = Target(tiny_model(), tokenizer=None)
    assert target.document_attention[1] is documents.one_per_row
    halves = target.hidden(TOKENS, (torch.arange(20) >= 10).long().expand(2, -1))
    torch.testing.assert_close(halves, target.hidden(TOKENS.view(4, 10)).view_as(halves))


def test_a_deep_model_in_bfloat16_passes_the_probe():
    """With a large vocabulary some logit always differs much by rounding."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, num_hidden_layers=24, vocab_size=8192, initializer_range=0.2)
    target = Target(LlamaForCausalLM(config).bfloat16(), tokenizer=None)
    assert target.document_attention is not None


def test_logit_scaling_is_honoured():
    model = AutoModelForCausalLM.from_config(GraniteConfig(**SMALL, logits_scaling=5.0)).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
    target = Target(model, tokenizer=None)
    torch.testing.assert_close(target.logits(target.hidden(TOKENS)), expected)


def test_layers_that_cannot_be_rolled_back_train_and_do_not_decode():
    config = Llama4TextConfig(**SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=1, attention_chunk_size=8)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        expected = model(TOKENS[:, :8]).logits
    half = InProcessTarget(model, tokenizer=None)
    with pytest.raises(UserError, match="chunked_attention"):
        Target.of(half)
    assert half.context_length == 8
    split = torch.tensor([[0] * 3 + [1] * 5] * 2)
    hidden, aux = half.training_states(TOKENS[:, :8], split, [0, 1])
    assert aux.shape == (2, 8, 2 * half.hidden_size)
    torch.testing.assert_close(half.logits(hidden[:, :3]), expected[:, :3])
    torch.testing.assert_close(hidden[:, 3:], half.hidden(TOKENS[:, 3:8]))


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (
            FalconConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
            r"can't be run.*compute attention in their own code.*failed-probe\.md",
        ),
        (
            OPTConfig(
                vocab_size=32,
                hidden_size=32,
                num_hidden_layers=2,
                ffn_dim=64,
                num_attention_heads=4,
                word_embed_proj_dim=32,
            ),
            r"does not compute logits from hidden states alone; see docs/contributing/failed-probe\.md",
        ),
    ],
    ids=["falcon", "opt"],
)
def test_families_that_do_not_use_the_registered_attention_are_refused(config, cause):
    """Single rows would be right; a ragged batch would not."""
    with pytest.raises(UserError, match=cause):
        Target(AutoModelForCausalLM.from_config(config), tokenizer=None)


def count_from_zero(rotary, x, position_ids):
    return ROTARY(rotary, x, torch.arange(x.shape[1])[None])


def count_from_the_longest_row(rotary, x, position_ids):
    return ROTARY(rotary, x, position_ids[:, :1].max() + torch.arange(x.shape[1])[None])


ROTARY = modeling_llama.LlamaRotaryEmbedding.forward


@pytest.mark.parametrize("wrong", [count_from_zero, count_from_the_longest_row])
def test_the_probe_names_the_first_pass_that_differs(wrong, monkeypatch):
    """Positions of the model's own are right in a prefill, and wrong where rows have accepted unequal numbers."""
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", wrong)
    with pytest.raises(UserError, match="first in the token after a rejected draft"):
        Target(tiny_model(), tokenizer=None)


def test_an_attention_that_sees_the_future_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "mask", lambda *arguments: None)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UserError, match="exactly"):
            Target(tiny_model().to(dtype), tokenizer=None)


def test_a_model_still_generates_through_transformers_after_loading():
    model = tiny_model()
    expected = model.generate(TOKENS[:1], max_new_tokens=10, do_sample=False)
    target = Target(model, tokenizer=None)
    assert torch.equal(target.model.generate(TOKENS[:1], max_new_tokens=10, do_sample=False), expected)


def test_a_checkpoint_with_missing_weights_is_refused(target_folder, tmp_path):
    """transformers would use random ones."""
    folder = shutil.copytree(target_folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"model\.layers\.\d"):
        Target.load(str(folder))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_a_gpu_reads_packed_documents_by_flash_attention(family):
    target = Target(tiny_model(family).to("cuda", torch.bfloat16), tokenizer=None)
    assert target.document_attention[0] == VARLEN
    tokens = torch.arange(2 * 48, device="cuda").view(2, 48) * 7 % 31
    documents = torch.arange(48, device="cuda").expand(2, -1) // 16
    hidden = target.hidden(tokens, documents)
    alone = target.hidden(tokens.view(-1, 16)).view_as(hidden)
    assert (hidden - alone).norm() < 2e-2 * alone.norm()
