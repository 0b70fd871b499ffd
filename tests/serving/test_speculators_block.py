"""DSpark, DFlash and DFlash 2 heads give the same logits here and in `speculators` 0.9.0, to 1e-4."""

from pathlib import Path

import pytest
import torch
from conftest import DFLASH, DFLASH2, LLAMA3
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from speculator.checkpoints import layout_of, load_any, save
from speculator.checkpoints.block_drafters import kind_of
from speculator.heads import DSparkSpeculator, DSparkSpeculatorConfig
from speculator.target.packed import document_starts

V, D, LENGTH = 300, 64, 40
KINDS = {
    "dspark": {},
    "one layer": {"num_hidden_layers": 1, "draft_vocab_size": 100},
    "fill-in dspark": {"sample_from_anchor": False},
    "three layers, llama3 rope": {"num_hidden_layers": 3, "rope_parameters": LLAMA3},
    "dflash": DFLASH,
    "dflash, causal": {**DFLASH, "is_causal": True, "sliding_window": 64},  # of full attention it has no causal blocks
    "dflash, draft vocabulary": {**DFLASH, "draft_vocab_size": 100},
    "dflash 2": {**DFLASH2, "selector_top_k": 16},
    "dflash 2, window": {**DFLASH2, "sliding_window": 64},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"vocab_size": V, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_library(tmp_path, base, kind, run_in, report):
    torch.manual_seed(1)
    shape = {"vocab_size": V, "emb_dim": D, "inner_dim": 96, "n_predict": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 24, "aux_layers": [2, 4, 5], "num_hidden_layers": 2}
    shape |= {"markov_rank": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "mask_token_id": 7}
    config = DSparkSpeculatorConfig(**shape | {"base_model_name_or_path": str(base)} | KINDS[kind])
    head = DSparkSpeculator(config)
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "norm" in name or "base_kernel" in name else 0.0, std=0.2)
    if head.draft_tokens is not None:
        head.draft_tokens.copy_(torch.randperm(V)[:100].sort().values)
    save(head, tmp_path / "head", layout_of("speculators", head))
    given = {
        "aux_hidden": torch.randn(1, LENGTH, head.fc.in_features),
        "tokens": torch.randint(V, (1, LENGTH)),
        "documents": torch.tensor([[0] * 13 + [1] * (LENGTH - 13)]),
        "hidden": torch.randn(1, LENGTH, D),
        "anchors": torch.tensor([1, 6, 14, 15, 30]),
    }
    save_file(given, tmp_path / "inputs")
    name = kind_of(config)
    run_in("speculators", "speculators_block_logits.py", name, tmp_path / "head", tmp_path / "inputs", tmp_path)
    theirs = load_file(tmp_path / "logits.safetensors")

    again = load_any(tmp_path / "head")
    model = LlamaForCausalLM.from_pretrained(base)
    again.share(model.get_input_embeddings().weight, model.get_output_embeddings())
    tokens, anchors = given["tokens"], given["anchors"]
    rows = torch.zeros(len(anchors), dtype=torch.long)
    places = anchors[:, None] + torch.arange(4)
    with torch.no_grad():
        starts = document_starts(given["documents"])[rows, anchors]
        features = again.blocks(given["aux_hidden"], tokens, rows, anchors, starts)
        logits = again.output_logits(features)
        if again.markov_head is not None:
            markov = again.markov_head.markov_w1(tokens[0, places])
            logits = logits + again.markov_head.markov_w2(markov)
            confidence = again.confidence_head.proj(torch.cat([features, markov], -1))[..., 0]
        if again.candidate_selector is not None:
            scores = again.candidate_selector(features, logits, tokens[0, places])
            logits = scores.masked_fill(scores.isinf(), 0.0)
        teacher = again.target_output(model.model.norm(given["hidden"][0, places]))

    used = slice(config.block_size - 4, None)
    found = {"logits": logits, "targets": teacher}
    if again.markov_head is not None:
        found["confidence"] = confidence
    gaps = {name: (x - theirs[name][:, used].view(x.shape)).abs().max().item() for name, x in found.items()}
    spread = theirs["logits"].std()
    report(f"{kind}: the logits differ by {gaps['logits']:.1g}, their spread is {spread:.2f}")
    assert spread > 0.3
    assert max(gaps.values()) <= 1e-4, gaps
