"""Evaluation of encoder-decoder targets on suites of prompts and completions."""

import json
import re

import pytest
from conftest import measured, tiny_head
from encoder_decoders import save_encoder_decoder

from eval.greedy_check import greedy_checks
from eval.suites import load_suite
from eval.tune import lookup_acceptance
from speculator import NgramDrafter, Target, UserError
from speculator.target.text import Text

_SIZES = {"prompt_tokens": 8, "max_prompts": 4, "max_new_tokens": 12}


@pytest.fixture(scope="module", params=["mt5", "bart"])
def target(request, tmp_path_factory) -> Target:
    """mT5's decoder has more layers than its encoder."""
    return Target.load(str(save_encoder_decoder(tmp_path_factory.mktemp("target"), request.param)))


@pytest.fixture
def suite_of(tmp_path):
    def suite_of(target: Target, *rows: dict, **sizes: int):
        file = tmp_path / "suite.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_suite(str(file), target, **_SIZES | sizes)

    return suite_of


_ROWS = [{"prompt": text, "completion": "x"} for text in ("import os", "def main(self, name):", "x = y", "return 1")]


def test_a_suite_whose_answers_exceed_the_decoders_context_is_refused(target, suite_of):
    most = target.context_length - len(target.encoder.prefix)
    assert len(suite_of(target, *_ROWS, max_new_tokens=most).prompts) == 4
    with pytest.raises(UserError, match=f"{most + 1} new ones do not fit {re.escape(target.name)}"):
        suite_of(target, *_ROWS, max_new_tokens=most + 1)


def test_answers_to_prompts_that_are_cut_from_text_end_at_eos_too(target, tmp_path):
    (tmp_path / "text.txt").write_text("def main(self, name):\n" * 30)
    assert load_suite(str(tmp_path / "text.txt"), target, **_SIZES).chat


def test_all_drafters_are_measured_and_texts_are_those_of_transformers(target, suite_of, tmp_path, figures_only):
    suite = suite_of(target, *_ROWS)
    assert suite.chat  # answers end at EOS
    small = Target.load(target.name)
    report = measured(
        target,
        tiny_head(vocab_size=300),
        [suite],
        tmp_path / "out",
        temperatures=[0.0],
        max_new_tokens=12,
        speculator_name="test",
        batch_sizes=[1, 2],
        draft_model=small,
        baselines=["hf_assisted", "hf_prompt_lookup"],
    )
    # transformers drafts at batch size 1 only; nothing else fails.
    assert all("batch size 1" in reason for reason in report["not_run"].values())
    for row in report["suites"]:
        assert row["drafter"] in ("none", "head", "ngram", "draft_model")
        assert row["identical_to_greedy"]["identical"] == 4, (row["drafter"], row["batch_size"])
        # The draft model is the target itself, and reads each source with its own encoder.
        assert (row["drafter"] == "draft_model") == (row["acceptance_length"] == 4)


def test_the_greedy_check_passes_and_conversations_are_refused(target, suite_of):
    assert all(check.passed for check in greedy_checks(target, NgramDrafter(3), suite_of(target, *_ROWS).prompts, 12))
    with pytest.raises(UserError, match="turns"):
        suite_of(target, {"turns": ["a", "b"]})


def test_lookup_acceptance_counts_what_the_source_has():
    found = lookup_acceptance([(Text([0], (5, 6, 7, 8)), [5, 6, 7, 8])])
    assert found[0] > lookup_acceptance([(Text([0]), [5, 6, 7, 8])])[0]
