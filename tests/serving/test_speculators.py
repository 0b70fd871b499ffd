"""EAGLE-3 heads with every option give the same logits here and in `speculators` 0.9.0, to 1e-4."""

from pathlib import Path

import pytest
import torch
from conftest import LLAMA3
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from speculator.checkpoints import layout_of, load_any, save
from speculator.heads import Eagle3Speculator, Eagle3SpeculatorConfig

V, D, STEPS = 300, 64, 4
KINDS = {
    "3.1": {},
    "3": {"fc_norm": False, "norm_output": False, "draft_vocab_size": None},
    "speculators": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "sliding_window": 64},
    "llama3": {
        "rope_parameters": LLAMA3,
        "attention_bias": True,
        "aux_layers": [1, 2, 3, 6],
        "norm_before_residual": True,
    },
    "qwen3": {"qk_norm": True, "fc_norm": False, "own_embedding": True},
    "window": {"sliding_window": 5},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"vocab_size": V, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_library(tmp_path, base, kind, run_in, report):
    torch.manual_seed(1)
    shape = {"vocab_size": V, "emb_dim": D, "inner_dim": 96, "n_predict": STEPS, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 24, "aux_layers": [2, 4, 5], "draft_vocab_size": 100}
    config = Eagle3SpeculatorConfig(**shape | {"base_model_name_or_path": str(base)} | KINDS[kind])
    head = Eagle3Speculator(config)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=0.0 if "bias" in name else 1.0, std=0.2)
    if head.draft_tokens is not None:
        head.draft_tokens.copy_(torch.randperm(V)[:100].sort().values)
    save(head, tmp_path / "head", layout_of("speculators", head))
    length = 40
    aux_hidden, tokens = torch.randn(1, length, head.fc.in_features), torch.randint(V, (1, length))
    documents = torch.tensor([[0] * 13 + [1] * (length - 13)])
    given = {"aux_hidden": aux_hidden, "tokens": tokens, "documents": documents, "steps": torch.tensor(STEPS)}
    save_file(given, tmp_path / "inputs")
    run_in("speculators", "speculators_logits.py", tmp_path / "head", tmp_path / "inputs", tmp_path)
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    # The library pads the end of the text with token 0.
    whole = torch.cat([tokens, tokens.new_zeros(1, STEPS - 1)], 1)

    def distance(ours: Eagle3Speculator) -> float:
        with torch.no_grad():
            logits = torch.stack([ours.lm_head(x) for x in ours.unrolled(aux_hidden, whole, documents)])
        # The library's window counts rows; here and in servers it counts positions, which advance with the steps.
        return (logits - theirs)[: 1 if kind == "window" else STEPS].abs().max().item()

    assert theirs.std() > 0.3
    report(
        f"{kind}: the logits differ by {distance(load_any(tmp_path / 'head')):.1g}, their spread is {theirs.std():.2f}"
    )
    assert distance(load_any(tmp_path / "head")) <= 1e-4
    assert distance(load_any(tmp_path / "saved")) <= 1e-4
    wrong = load_any(tmp_path / "head")
    wrong.config.norm_output = not wrong.config.norm_output
    assert kind == "window" or distance(wrong) > 1e-2
