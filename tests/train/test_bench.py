import pytest

from speculator.target import Target
from train.bench import memory, step_over_target


def test_a_chunked_loss_needs_a_fraction_of_the_memory():
    """Five times 256 x 60,000 logits in float32 are 307 MB, and log-softmax and its gradient want more of each."""
    rows = memory(tokens=256, vocabulary=60_000, width=32, heads=4)
    assert rows == memory(tokens=256, vocabulary=60_000, width=32, heads=4), "counted, not sampled"
    peak = {(row["loss"], row["chunked"]): row["bytes"] for row in rows}
    assert peak["KL", False] > 307e6
    assert peak["KL", True] < peak["KL", False] / 3
    assert peak["cross-entropy", True] < peak["cross-entropy", False] / 3


def test_a_step_is_counted_in_operations_of_the_targets_forward(target_folder):
    rows = step_over_target(Target.load(str(target_folder)), heads=2, length=32, runs=1)
    by_loss = {row["loss"]: row["operations"] for row in rows}
    assert by_loss["KL"] == pytest.approx(by_loss["LK"])
    assert by_loss["KL"] > by_loss["cross-entropy"] > 1, "the law costs the target's lm_head"
    assert all(row["time"] > 0 for row in rows)
