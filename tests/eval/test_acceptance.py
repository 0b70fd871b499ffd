import pytest

from eval.acceptance import acceptance
from speculator import Step

STEPS = [Step(3, 3, 4), Step(3, 1, 2), Step(3, 0, 1), Step(2, 2, 3), Step(3, 3, 2)]


def test_figures_by_hand():
    """Four steps count (the last was cut): 3, 1, 0 and 2 accepted, the fourth of two drafted."""
    figures = acceptance(STEPS, 3)
    assert figures["steps"] == 4
    assert figures["tokens_per_step"] == 1 + 6 / 4
    assert figures["acceptance_by_position"] == [3 / 4, 2 / 3, 1 / 2]
    assert figures["acceptance_when_drafted"] == [3 / 4, 2 / 3, 1 / 1]


def test_no_draft_is_one_token_a_step():
    assert acceptance([Step(0, 0, 1)] * 3, 0)["tokens_per_step"] == 1.0


def test_inconsistent_steps_are_seen():
    with pytest.raises(AssertionError):
        acceptance([Step(5, 5, 6)], 3)
