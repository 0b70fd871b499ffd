"""Heads with a cache read prompts together or, on a CPU, long ones row by row."""

import pytest
from conftest import tiny_model
from drafters import make_drafter

from speculator import Engine, HeadDrafter, Target
from speculator.heads.attention import cached_source

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9], [2, 7, 1]]


def drafts(name: str, monkeypatch, short: int) -> list:
    """Return the tokens of the first three drafts after prompts of which those of `short` tokens count as long."""
    monkeypatch.setattr(cached_source, "_SHORT", short)
    target = Target(tiny_model().double(), None)
    made, propose = [], HeadDrafter.propose

    def noted(self, *given):
        made.append(propose(self, *given))
        return made[-1]

    monkeypatch.setattr(HeadDrafter, "propose", noted)
    drafter = make_drafter(name, target)
    Engine(target, drafter, slots=len(PROMPTS)).generate(PROMPTS, max_new_tokens=12, eos_token_ids=())
    monkeypatch.undo()
    return [draft.tokens.tolist() for draft in made[:3]]


@pytest.mark.parametrize("name", ["attention-chain", "block-chain", "mtp-chain"])
def test_drafts_do_not_depend_on_whether_prompts_are_read_together(name, monkeypatch):
    together = drafts(name, monkeypatch, 64)
    assert together[0]
    assert drafts(name, monkeypatch, 1) == together
