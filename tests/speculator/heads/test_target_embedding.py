"""MLP heads that read the target's embedding (`own_embedding: false`)."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import UserError
from speculator.checkpoints import layout_of, load_any, save
from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.target.fingerprint import fingerprint

V, D = 23, 8
HEADS = [{"tie_weights": True}, {"tie_weights": False}]
EMBEDDING = torch.randn(V, D, generator=torch.Generator().manual_seed(2)) * 0.02


def head_of(kind: int = 0, **changes) -> MLPSpeculator:
    torch.manual_seed(0)
    shape = {"vocab_size": V, "emb_dim": D, "n_predict": 3, "own_embedding": False, **HEADS[kind], **changes}
    return MLPSpeculator(MLPSpeculatorConfig(**shape)).eval()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 4, D, generator=generator), torch.randint(V, (2, 6), generator=generator)


@pytest.fixture
def base(tmp_path):
    """A target in a folder."""
    torch.manual_seed(4)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    LlamaForCausalLM(LlamaConfig(vocab_size=V, hidden_size=D, **sizes)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", range(len(HEADS)))
def test_the_embedding_is_neither_stored_nor_trained(kind):
    head = head_of(kind)
    head.share_embedding(EMBEDDING)
    assert all(tuple(tensor.shape) != (V, D) or "head" in name for name, tensor in head.state_dict().items())
    head.logits(*inputs()).square().sum().backward()
    tables = {head.embedding(i) for i in range(3)}
    assert len(tables) == (3 if kind == 1 else 1)
    assert all(table.proj.weight.grad.abs().sum() > 0 for table in tables)
    assert head.embedding(0).shared[0].data_ptr() == EMBEDDING.data_ptr()


@pytest.mark.parametrize("inner", [8, 256])
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_a_new_head_reads_tokens_at_the_scale_of_an_embedding_of_its_own(inner, scale):
    """Whatever the scale of the target's embedding."""
    sizes = {"vocab_size": 2000, "emb_dim": 64, "inner_dim": inner}
    own, shared = (head_of(**sizes, own_embedding=own) for own in (True, False))
    shared.share_embedding(torch.randn(2000, 64) * scale)
    tokens = torch.arange(2000)
    found, expected = (head.embedding(0)(tokens).std().item() for head in (shared, own))
    assert found == pytest.approx(expected, rel=0.15)


def test_the_targets_matrices_start_the_projection_near_the_identity():
    head = head_of(vocab_size=200, emb_dim=64)
    embedding = torch.randn(200, 64)
    head.initialise_from(embedding, torch.randn(200, 64))
    head.share_embedding(embedding)
    tokens = torch.arange(200)
    similar = nn.functional.cosine_similarity(head.embedding(0)(tokens), embedding)
    assert similar.min() > 0.8
    head = head_of(vocab_size=200, emb_dim=64)
    head.share_embedding(embedding)
    assert nn.functional.cosine_similarity(head.embedding(0)(tokens), embedding).abs().mean() < 0.3


def test_an_embedding_of_another_width_is_refused():
    head = head_of()
    with pytest.raises(UserError, match="size 8, the target has 9"):
        head.bind(LlamaConfig(), torch.ones(V, 9), nn.Linear(D, V))


def test_a_head_without_its_target_says_what_to_call():
    with pytest.raises(UserError, match=r"call bind\(head, target\)"):
        head_of().logits(*inputs())


@pytest.mark.parametrize("kind", range(len(HEADS)))
def test_a_probe_reads_its_own_matrix_and_leaves_the_targets(kind):
    head = head_of(kind)
    head.share_embedding(EMBEDDING)
    before = head.logits(*inputs())
    hidden, tokens, matrix = head.probe()
    assert not torch.equal(head.logits(hidden, tokens, matrix), head.logits(hidden, tokens))
    assert torch.equal(head.logits(*inputs()), before)


@pytest.mark.parametrize("kind", range(len(HEADS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_native_layout_keeps_every_bit(tmp_path, kind, dtype):
    head = head_of(kind).to(dtype)
    save(head, tmp_path / "native", layout_of("native", head))
    again = load_any(tmp_path / "native")
    assert not again.config.own_embedding
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in head.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "name"), [(0, "ibm"), (0, "arctic"), (1, "ibm"), (0, "vllm-plugin"), (1, "vllm-plugin")]
)
def test_layouts_of_servers_store_an_embedding_that_drafts_the_same(tmp_path, base, kind, name):
    head = head_of(kind, base_model_name_or_path=str(base))
    head.config.base_model_fingerprint = fingerprint(LlamaForCausalLM.from_pretrained(base))
    save(head, tmp_path / "served", layout_of(name, head))
    served = load_any(tmp_path / "served")
    assert served.config.own_embedding
    head.share_embedding(load_file(base / "model.safetensors")["model.embed_tokens.weight"])
    torch.testing.assert_close(served.logits(*inputs()), head.logits(*inputs()), rtol=0, atol=1e-5)
    # Another target's embedding gives other drafts, so it is refused.
    other = tmp_path / "other"
    shutil.copytree(base, other)
    LlamaForCausalLM(LlamaConfig.from_pretrained(base)).save_pretrained(other)
    head.config.base_model_name_or_path = str(other)
    with pytest.raises(UserError, match="other weights than the head was trained for"):
        save(head, tmp_path / "wrong", layout_of(name, head))
    assert not (tmp_path / "wrong").exists()
