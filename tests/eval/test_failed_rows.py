"""A prompt that fails leaves the others' texts; a figure that needs all of them is an error, never one of cut texts."""

import pytest
import torch
from conftest import tiny_head

from benchmarks import study
from eval import gate, tune
from eval.sampled_check import _completions
from eval.suites import Suite
from eval.timing import Timed, step_seconds, time_ours
from eval.validation import real_acceptance
from speculator import Chain, Engine, NgramDrafter, Sampling, UserError
from speculator.custom_generate import speculative

BAD = 31
SUITE = Suite("s", [[1, 2, 3], [BAD] * 4])


def by_custom_generate(target, head):
    once = speculative(NgramDrafter())
    rows = torch.tensor([[1, 2, 3, 4], [5] * 4])
    settings = {"attention_mask": torch.ones_like(rows), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    target.model.get_input_embeddings().weight.data[BAD] = 0.0  # the model is probed in the first call
    target.model.generate(rows, **settings, custom_generate=once)
    target.model.get_input_embeddings().weight.data[BAD] = torch.nan
    target.model.generate(torch.tensor(SUITE.prompts[1:] * 2), **settings, custom_generate=once)


CALLERS = {
    "custom_generate": by_custom_generate,
    "gate": lambda target, head: gate.compare_on_guard(target, [head, head], SUITE, Sampling(), 4, 0.05),
    "sampled check": lambda target, head: _completions(Engine(target, slots=2), SUITE.prompts[1], Sampling(1.0), 2),
    "study": lambda target, head: study.measure(head, target, SUITE),
    "timing": lambda target, head: time_ours(target, None, SUITE.prompts, Sampling(), 4, Timed(), {}),
    "seconds of a step": lambda target, head: step_seconds(target, SUITE.prompts[1], 1),
    "tune": lambda target, head: tune.write_tuning(target, head, SUITE, "unwritten", 4, Sampling(1.0)),
    "validation": lambda target, head: real_acceptance(target, head, SUITE, 0, 4),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_a_figure_of_rows_of_which_one_failed_is_an_error(target, caller, monkeypatch):
    monkeypatch.setattr(tune, "rank_acceptance", lambda *_, **__: [[0.5]] * 3)
    monkeypatch.setattr(tune, "_with_costs", lambda *_: pytest.fail("cut texts were measured"))
    monkeypatch.setattr(study, "DRAFTS", {"T=0": (0.0, Chain(3))})
    target.model.get_input_embeddings().weight.data[BAD] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        CALLERS[caller](target, tiny_head())
