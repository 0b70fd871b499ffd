import pytest
from conftest import tiny_head

from eval.acceptance import acceptance, real_acceptance
from eval.suites import Suite
from speculator import HeadDrafter, Sampling, Step, generate

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


def test_answers_of_chats_end_where_the_target_ends_them_and_texts_go_on(target):
    head, prompts, count = tiny_head(), [[1, 2, 3, 4], [5, 6, 7, 8]], 24
    texts = generate(target, None, prompts, max_new_tokens=count, eos_token_ids=()).tokens
    end = texts[0][7]
    target.model.generation_config.eos_token_id = end

    def expected(eos) -> float:
        drafter = HeadDrafter(head)
        made = generate(target, drafter, prompts, Sampling(), max_new_tokens=count, eos_token_ids=eos)
        steps = [step for row in made.steps for step in row]
        return len(steps), acceptance(steps, drafter.draft_length)["tokens_per_step"]

    assert expected({end})[0] < expected(())[0]
    for ends, eos in ((True, {end}), (False, ())):
        figures = real_acceptance(target, head, Suite("s", prompts, ends=ends), 0, count)
        assert figures["tokens_per_step"] == expected(eos)[1]
