"""`python -m eval --as vllm` predicts the counters of vLLM 0.32: drafts, and accepted tokens per position."""

import pytest
import torch
from conftest import DFLASH, measured
from serving.shared import TARGET, fitted, vllm_runs

from data.mixture import PYTHON_SOURCES
from eval.suites import held_out
from speculator import Target
from speculator.checkpoints import layout_of, save
from speculator.checkpoints.loading import bind
from speculator.heads import (
    DSparkSpeculator,
    DSparkSpeculatorConfig,
    Eagle3Speculator,
    Eagle3SpeculatorConfig,
    MLPSpeculator,
    MLPSpeculatorConfig,
)

SOURCES = ("eval",)
PROMPTS, NEW = 40, 24
KINDS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3Speculator, {}, "eagle3", "eagle3"),
    "mlp": (MLPSpeculatorConfig, MLPSpeculator, {}, "vllm-plugin", "eagle"),
    "dflash": (
        DSparkSpeculatorConfig,
        DSparkSpeculator,
        {"num_hidden_layers": 1, "mask_token_id": 3, **DFLASH},  # one layer: vLLM's CPU backend mixes up the k_norms
        "dflash",
        "dflash",
    ),
}


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_accepted_tokens_per_position_are_predicted(tmp_path, run_in, report, kind, length):
    config_class, head_class, changes, layout, method = KINDS[kind]
    least = 2 if kind == "mlp" else 1  # its steps share their weights
    target = Target.load(str(TARGET), dtype="float32")
    suite = held_out(PYTHON_SOURCES, target.tokenizer, 64, PROMPTS)
    torch.manual_seed(0)
    config = config_class.for_target(
        target.config, n_predict=max(length, least), base_model_name_or_path=str(TARGET), **changes
    )
    steps, rate = (320, 3e-3) if kind == "dflash" else (120, 1e-3)
    head = fitted(bind(head_class(config), target), target, suite.prompts, NEW, steps, rate)
    save(head, tmp_path / "head", layout_of(layout, head))

    ours = measured(
        target,
        head,
        [suite],
        tmp_path / "report",
        temperatures=[0.0],
        max_new_tokens=NEW,
        speculator_name=kind,
        lengths=[length],
        server="vllm",
    )["suites"][1]["server_log"]
    ends = sorted(target.eos_token_ids)
    runs = [[{"prompt": prompt, "max_new_tokens": NEW, "ends": ends} for prompt in suite.prompts]]
    speculative = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": length}
    engine = {"max_model_len": 512, "max_num_seqs": 8}
    (theirs,) = vllm_runs(run_in, tmp_path, runs, speculative, engine=engine)
    accepted, drafts = [int(count) for count in theirs["accepted"]], int(theirs["spec_decode_num_drafts"])
    report(f"{kind}, G = {length}: vLLM {accepted} of {drafts} drafts, predicted {ours}")
    assert (ours["drafts"], ours["accepted_per_position"]) == (drafts, accepted)
    assert all(0 < count < drafts for count in accepted[:2])  # so that a shift by a position shows
