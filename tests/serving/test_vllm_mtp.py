"""vLLM drafts with an MTP layer that was tuned here and written back what our decoder drafts with it."""

from functools import partial

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


ANYTHING = """
import importlib.abc, importlib.machinery, sys
from unittest.mock import MagicMock

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()

class Anything(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def exec_module(self, module):
        module.__getattr__ = __getattr__

sys.meta_path.append(Anything())
"""
"""A torchvision with any name in it: vLLM's Qwen 3.5 imports image processors, of which text uses none."""


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
    if family == "qwen3_5":
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(ANYTHING)
        (tmp_path / "torchvision-0.28.0.dist-info").mkdir()
        about = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n"
        (tmp_path / "torchvision-0.28.0.dist-info" / "METADATA").write_text(about)
        run_in = partial(run_in, PYTHONPATH=str(tmp_path))
    made = vllm_runs(run_in, tmp_path, runs, speculative, engine=engine, target=str(tmp_path / "exported"))
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
