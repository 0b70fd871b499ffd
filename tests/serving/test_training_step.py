"""`python -m benchmarks.training --peer speculators` compares equal work: both libraries have the same loss."""

import pytest
import torch

from benchmarks.peer import WORK, compare


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_loss_of_equal_work_is_that_of_the_library(requested, kind, report):
    equal, configured = compare(kind, "smollm2-135m", torch.float32, length=128, drafted=1024, runs=1)
    assert (equal["work"], configured["work"]) == WORK
    # The library averages DSpark's loss over the slots of a block, where ours adds it up; it draws its own anchors.
    ours = equal["loss"]["ours"] / (5 if kind == "dspark" else 1)
    theirs = equal["loss"]["speculators"]
    report(f"{kind}: loss {ours:.4f}, {theirs:.4f} in the library")
    assert ours == pytest.approx(theirs, rel=0.03)
    assert configured["loss"]["ours"] / equal["loss"]["ours"] != pytest.approx(1, rel=0.1)
