"""vLLM drafts with an MTP layer that was tuned here and written back what our decoder drafts with it."""

from functools import partial
from pathlib import Path

import pytest
from mtp_models import config_of, model_of, mtp_of, save
from serving.shared import fitted, own_steps, vllm_runs

from speculator import Target
from speculator.checkpoints import layout_of, load_any
from speculator.checkpoints import save as save_head
from speculator.checkpoints.loading import bind, load_head

SOURCES = ("tests",)
LENGTH, NEW = 3, 30
PROMPTS = [[5, 9, 33, 2, 17], [41, 3], [7, 7, 8, 20, 11, 4, 50], [12, 60, 1]]
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
# vLLM makes the embedding at position 0 zero for GLM, and recycles the state before the layer's norm.
CASES = {
    "glm4_moe": (
        46,
        {"head_dim": 32, "moe_intermediate_size": 64, "attention_bias": True},
        {"zero_first": True, "recycle_normed": False},
    ),
    "qwen3_5": (4, {"head_dim": 64, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": True}, {}),
}


def without_torchvision(folder: Path) -> Path:
    """A package with any name in it: vLLM's Qwen 3.5 imports image processors, of which text uses none."""
    nothing = "from unittest.mock import MagicMock\n\n\ndef __getattr__(name):\n    return MagicMock()\n"
    for package in ("torchvision", "torchvision/transforms", "torchvision/transforms/v2", "torchvision/io"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(nothing)
    (folder / "torchvision/transforms/v2/functional.py").write_text(nothing)
    return folder


@pytest.mark.parametrize("family", CASES)
def test_drafts_and_text_equal_ours(family, tmp_path, run_in, report):
    layers, sizes, options = CASES[family]
    config = config_of(family, layers, **SIZES, **sizes)
    model = model_of(config)
    folder = save(tmp_path / "target", model, mtp_of(model))
    target = Target.load(str(folder))
    head = fitted(bind(load_any(folder), target), target, PROMPTS[:2], 60, steps=60, rate=3e-3)
    head.config.base_model_fingerprint, head.config.base_model_name_or_path = target.fingerprint, str(folder)
    save_head(head, tmp_path / "exported", layout_of("mtp", head))
    again = load_head(tmp_path / "exported", target)
    for name, value in options.items():
        setattr(again.config, name, value)
    runs = [[{"prompt": prompt, "max_new_tokens": NEW}] for prompt in PROMPTS]
    engine = {"max_model_len": 128, "max_num_seqs": 1, "skip_tokenizer_init": True, "enable_prefix_caching": False}
    speculative = {"method": "mtp", "num_speculative_tokens": LENGTH}
    run = partial(run_in, PYTHONPATH=str(without_torchvision(tmp_path / "stub")))
    made = vllm_runs(run, tmp_path, runs, speculative, engine=engine, target=str(tmp_path / "exported"))
    same = steps = accepted = 0
    for prompt, theirs in zip(PROMPTS, made, strict=True):
        drafts, counts, text = own_steps(target, again, LENGTH, prompt, NEW)
        assert theirs["texts"][0][: len(text)] == text  # ours ends at the tokenizer's EOS
        for ours, (*_, its) in zip(drafts, theirs["drafts"], strict=False):
            steps, same = steps + 1, same + (ours == its)
        accepted += sum(counts)
        assert len(theirs["drafts"]) >= len(drafts)
    report(f"{family}: {same} of {steps} drafts of {LENGTH} tokens equal, {accepted} tokens accepted")
    assert same == steps
    assert accepted > 0
