"""What is refused before a run takes its folder."""

from dataclasses import replace

import pytest
from datasets import Dataset

from speculator import UserError
from train import checks
from train.config import parse


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval.temperatures", "[]"], "eval.temperatures is empty"),
        (["--eval.temperatures", "[-1]"], "temperature"),
        (["--stage1.learning_rate", "-1"], "stage1.learning_rate must be above 0"),
        (["--stage1.learning_rate", "0"], "stage1.learning_rate must be above 0"),
        (["--stage1.adam_beta2", "2"], "stage1.adam_beta2"),
        (["--stage2.warmup_steps", "-5"], "stage2.warmup_steps must not be negative"),
        (["--stage1.weight_decay", "-1"], "stage1.weight_decay must not be negative"),
        (["--stage1.max_grad_norm", "-1"], "stage1.max_grad_norm must not be negative"),
        (["--seed", "-1"], "seed must be in"),
        (["--seed", "99999999999999"], "seed must be in"),
        (["--speculator.inner_dim", "-3"], "speculator.inner_dim"),
        (["--speculator.n_predict", "0"], "speculator.n_predict must be at least 1"),
        (["--loss.lk_eta", "-5"], "loss.lk_eta must not be negative"),
    ],
)
def test_numbers_that_cannot_be_are_named(flags, message):
    with pytest.raises(UserError, match=message):
        checks.settings(parse(flags))


def test_rows_with_a_token_that_the_target_has_not_are_refused(target):
    config = parse([])
    config = replace(config, stage1=replace(config.stage1, per_device_train_batch_size=1))
    rows, beyond = (
        Dataset.from_dict({"input_ids": [[0, 1, token]] * 400}) for token in (target.vocab_size - 1, target.vocab_size)
    )
    checks.rows(config, target, rows, rows, 1)
    for pair in ((rows, beyond), (beyond, rows)):
        with pytest.raises(UserError, match=f"hold token {target.vocab_size}"):
            checks.rows(config, target, *pair, 1)
