import json

import pytest

from benchmarks.shapes import random_target
from benchmarks.training import LOSSES, Training, main, memory, step_over_bound


@pytest.mark.soak
def test_a_chunked_loss_needs_a_fraction_of_the_memory():
    """Five times 1,024 x 60,000 logits in float32 are 1.2 GB, and log-softmax and its gradient want more of each.

    A chunk has 559 tokens.
    """
    rows = memory(tokens=1024, vocabulary=60_000, width=32, heads=4)
    assert rows == memory(tokens=1024, vocabulary=60_000, width=32, heads=4), "counted, not sampled"
    peak = {(row["loss"], row["chunked"]): row["bytes"] for row in rows}
    assert peak["KL", False] > 1.2e9
    assert peak["KL", True] < peak["KL", False] / 3
    assert peak["cross-entropy", True] < peak["cross-entropy", False] / 3


def test_the_time_of_a_training_step_is_compared_with_its_operations(tmp_path, capsys):
    assert main(["--preset", "tiny", "--runs", "1", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "training-tiny.json").read_text())
    rows = {row["loss"]: row for row in report["rows"]}
    assert list(rows) == ["cross-entropy", "KL", "LK"]
    for row in rows.values():
        assert row["time_over_bound"] == pytest.approx(
            row["seconds"] * row["operations_per_second"] / row["operations"]
        )
    # Of 2 x 64 tokens the target's products: two layers' weights, twice an operation each; attention is beside them.
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    assert rows["cross-entropy"]["operations"] > 2 * 128 * 2 * layer
    # The distribution of every token is one more product with the output matrix.
    probs = rows["KL"]["operations"] - rows["cross-entropy"]["operations"]
    assert probs == pytest.approx(2 * 128 * 64 * 512, rel=0.1)
    assert "| KL |" in capsys.readouterr().out


def test_the_memory_of_a_step_has_weights_and_moments_in_it():
    """The target's weights in bfloat16, the head's and two moments in float32, and at the height its gradient."""
    target = random_target("tiny")
    training = Training(target, LOSSES["KL"], 2, 64, n_predict=3, inner_dim=32)
    training.step()
    head = sum(parameter.numel() for parameter in training.head.parameters())
    assert training.held == pytest.approx(2 * target.model.num_parameters() + 12 * head, rel=0.01)
    rows = step_over_bound("tiny", runs=1)
    assert all(row["bytes"] > training.held + 4 * head for row in rows)
