"""Fused norms: only what is exactly an RMS norm is replaced, and no logit changes."""

import pytest
import torch
from conftest import CONFIGS, RECURRENT, tiny_model

from speculator.kernels.fused_norms import fuse_norms

# Gemma 2 and 3, Qwen3-Next and 3.5 multiply by 1 + weight; GPT-2 and GPT-NeoX subtract the mean; gated norms read more.
OTHERS = {"gemma2", "gemma3", "gpt2", "gpt_neox", "qwen3_next", "qwen3_5", "qwen3_5_moe"}


@pytest.mark.parametrize("family", [*CONFIGS, *RECURRENT])
@torch.no_grad()
def test_logits_are_those_of_the_familys_own_norms(family):
    model, tokens = tiny_model(family), torch.arange(2 * 12).view(2, 12) * 7 % 31
    for name, weight in model.named_parameters():
        if "norm" in name and weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=1.0)
    own = model(input_ids=tokens, use_cache=False).logits
    assert (not fuse_norms(model)) == (family in OTHERS)
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, own)
    assert not fuse_norms(model), "a second target of the same model finds them"
