import subprocess
import sys
from pathlib import Path

import pytest

from speculator.target import Target
from train.bench import step_over_target


def peak(how: str, loss: str) -> int:
    argv = [sys.executable, "-m", "train.bench", "--peak", loss, how, "256", "60000", "32", "4"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_chunked_loss_needs_a_fraction_of_the_memory():
    """Five times 256 x 60,000 logits in float32 are 307 MB, and log-softmax and its gradient want more of each."""
    naive, chunked = peak("naive", "KL"), peak("chunked", "KL")
    assert naive > 307e6
    assert chunked < naive / 3


def test_a_step_is_counted_in_operations_of_the_targets_forward(target_folder):
    rows = step_over_target(Target.load(str(target_folder)), heads=2, length=32, runs=1)
    by_loss = {row["loss"]: row["operations"] for row in rows}
    assert by_loss["KL"] == pytest.approx(by_loss["LK"])
    assert by_loss["KL"] > by_loss["cross-entropy"] > 1, "the law costs the target's lm_head"
    assert all(row["time"] > 0 for row in rows)
