import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from speculator.heads import MLPSpeculator, MLPSpeculatorConfig
from speculator.target.cache.kv_cache import KVCache

GOLDEN = Path(__file__).parents[2] / "golden"


def load(name: str) -> tuple[MLPSpeculator, dict[str, torch.Tensor]]:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        published = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    fields = ("vocab_size", "emb_dim", "inner_dim", "n_predict", "tie_weights", "scale_input")
    head = MLPSpeculator(MLPSpeculatorConfig(**{key: published[key] for key in fields}))
    head.load_state_dict({k.removeprefix("speculator."): v for k, v in tensors.items() if k.startswith("speculator.")})
    return head, tensors


@pytest.mark.parametrize("name", ["tied_scaled", "untied"])
def test_the_head_reproduces_the_published_logits(name):
    head, tensors = load(name)
    logits = head.logits(tensors["io.hidden_states"], tensors["io.tokens"])
    torch.testing.assert_close(logits, tensors["io.logits"], atol=1e-5, rtol=0)


def test_an_alpha_that_is_one_percent_off_changes_the_logits():
    head, tensors = load("tied_scaled")
    head.alpha *= 1.01
    logits = head.logits(tensors["io.hidden_states"], tensors["io.tokens"])
    assert (logits - tensors["io.logits"]).abs().max() > 1e-3


def test_save_and_auto_load_keep_every_logit(tmp_path):
    head, tensors = load("tied_scaled")
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, MLPSpeculator)
    inputs = tensors["io.hidden_states"], tensors["io.tokens"]
    assert torch.equal(again.logits(*inputs), head.logits(*inputs))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_training_reads_a_shared_embedding_once(tied, own):
    shape = {"vocab_size": 11, "emb_dim": 4, "n_predict": 3}
    head = MLPSpeculator(MLPSpeculatorConfig(**shape, tie_weights=tied, own_embedding=own))
    head.share_embedding(torch.randn(11, 4))
    reads = []
    for table in head.emb:
        table.register_forward_hook(lambda table, given, out: reads.append(table))
    hidden, tokens = torch.randn(2, 5, 4), torch.randint(11, (2, 7))
    logits = head.logits(hidden, tokens)
    assert reads == list(head.emb)
    source = head.drafting_source().open(KVCache([], 2, 10, torch.device("cpu")))
    source.prefill(0, [[0] * 5] * 2, [0, 0], hidden, [5, 5])
    torch.testing.assert_close(source.first(tokens[:, 4], [])[:, 0], logits[0, :, -1])
