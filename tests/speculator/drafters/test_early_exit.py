"""What the first layers draft is what they say of the text, along a chain and along a tree."""

import pytest
import torch
from conftest import CONFIGS, tiny_model

from speculator import Chain, EarlyExitDrafter, Engine, Sampling, Target, Tree, UserError

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]]


def expected_logits(target: Target, text: list[int], layers: int) -> torch.Tensor:  # [V]
    """By a fresh pass over the whole text in a model that has no other layers."""
    cache = target.cache(1, len(text))
    with target.aux_layers.first_layers(layers):
        return target.logits(target.extend(cache, torch.tensor([text])))[0, -1]


class Watched(EarlyExitDrafter):
    """Compares the logits of every drafted position with those of its path."""

    checked = 0

    def propose(self, pending, noise, texts):
        seen = []
        source = self.memory
        own, source.run = source.run, lambda *given: seen.append(own(*given)) or seen[-1]
        draft = super().propose(pending, noise, texts)
        del source.run
        for row, text in enumerate(texts):
            paths = {(): seen[0][row, 0]}
            if draft.parents is None:
                for i, logits in enumerate(seen[1:], start=1):
                    paths[tuple(draft.tokens[row, :i].tolist())] = logits[row, 0]
            for path, logits in paths.items():
                expected = expected_logits(source.target, [*text, *path], source.layers)
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
                Watched.checked += 1
        return draft


FAMILIES = ("llama", "gemma2", "gemma3n", "gemma4", "gpt2", "gpt_neox", "granite", "gpt_oss")
"""Families whose layers, norms or heads differ most; the others run in `make soak`."""


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.soak] * (family not in FAMILIES)) for family in CONFIGS]
)
def test_a_chain_is_drafted_from_what_the_first_layers_say_of_the_text(family):
    target = Target(tiny_model(family), tokenizer=None)
    for layers in {1, len(target.aux_layers.layers) - 1}:
        before = Watched.checked
        Engine(target, Watched(target, layers, 3), slots=2).generate(PROMPTS, Sampling(1.0), max_new_tokens=8)
        assert Watched.checked > before + 12


def test_early_exit_reads_the_state_after_its_last_layer():
    model = tiny_model()
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    target = Target(model, tokenizer=None)
    expected = model.lm_head(model.model.norm(states[1]))[0, -1]
    torch.testing.assert_close(expected_logits(target, PROMPTS[0], 1), expected, atol=1e-5, rtol=1e-5)
    assert len(model.model.layers) == 2, "the model is whole again"


@pytest.mark.parametrize("shape", [Chain(4), Tree((2, 2, 1, 1), nodes=14)])
def test_layers_that_decide_are_always_right(shape):
    """The other layer adds nothing to the stream: so every draft of the first is accepted, or was misread."""
    model = tiny_model().double()
    for name, parameter in model.model.layers[1].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    target = Target(model, tokenizer=None)
    for slots in (1, 3):
        engine = Engine(target, EarlyExitDrafter(target, 1, shape), slots=slots)
        assert engine.generate(PROMPTS, max_new_tokens=21).acceptance_length == 5


@pytest.mark.parametrize("layers", [-1, 0, 2, 3])
def test_a_count_of_layers_that_leaves_none_is_refused(target, layers):
    with pytest.raises(UserError, match=f"early exit after {layers} layers: .* has 2, so 1 to 1 can draft"):
        EarlyExitDrafter(target, layers)


def test_a_target_whose_layers_are_not_found_is_refused(target):
    target.aux_layers.layers = torch.nn.ModuleList()
    with pytest.raises(UserError, match="layers are not found"):
        EarlyExitDrafter(target, 1)
