import pytest
import torch
from conftest import CONFIGS, tiny_model

from speculator import Target, UserError
from speculator.decoding.draft import Draft
from speculator.decoding.drafter import Memory
from speculator.decoding.engine import Engine
from speculator.drafters import Drafter
from speculator.target.aux_layers import AuxLayers

TOKENS = torch.randint(0, 32, (2, 20), generator=torch.Generator().manual_seed(0))


def states_of(model, tokens, wanted):
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[k] if states[k].ndim == 3 else states[k][0] for k in wanted], -1)


@pytest.mark.parametrize("family", CONFIGS)
def test_aux_hidden_states_equal_transformers_in_training_prefill_and_verification(family):
    model, close = tiny_model(family), {"atol": 1e-3, "rtol": 1e-4}
    wanted = range(model.config.num_hidden_layers)
    expected = states_of(model, TOKENS, wanted)
    target = Target(model, tokenizer=None)
    with target.aux_layers.recorded(wanted) as read:
        hidden = target.hidden(TOKENS)
    torch.testing.assert_close(read(hidden), expected, **close)
    documents = torch.tensor([[0] * 9 + [1] * 11, [4] * 20])
    with target.aux_layers.recorded(wanted) as read:
        hidden = target.hidden(TOKENS, documents)
    torch.testing.assert_close(read(hidden)[0, 9:], states_of(model, TOKENS[:1, 9:], wanted)[0], **close)
    torch.testing.assert_close(read(hidden)[1], expected[1], **close)
    cache, lengths = target.cache(2, 20), torch.tensor([7, 4])
    with target.aux_layers.recorded(wanted) as read:
        hidden = target.extend(cache, TOKENS[:, :7])
    torch.testing.assert_close(read(hidden), expected[:, :7], **close)
    cache.commit(lengths)
    cache.select(0, 2, 7)
    following = torch.stack([row[n : n + 5] for row, n in zip(TOKENS, (7, 4), strict=True)])
    with target.aux_layers.recorded(wanted[1:]) as read:
        hidden = target.extend(cache, following)
    width = expected.shape[-1] // len(wanted)
    rows = [row[n : n + 5, width:] for row, n in zip(expected, (7, 4), strict=True)]
    torch.testing.assert_close(read(hidden), torch.stack(rows), **close)
    assert not any(layer._forward_pre_hooks for layer in target.aux_layers.layers), "a hook was left"


class Recording(Drafter):
    """Drafts a tree, with a memory that records the states of each sequence."""

    name, num_speculative_tokens, nodes, rules, aux_layers = "recording", 2, 4, ("match",), (0, 1)

    def __init__(self):
        self.memory = States()

    def propose(self, pending, noise, texts):
        self.memory.texts = [(text, len(text) - 1) for text in texts]
        guess = torch.stack([(pending * 7 + i) % 32 for i in range(4)], 1)
        parents = torch.tensor([-1, -1, 0, 1]).expand(len(pending), -1)
        return Draft(tokens=guess, lengths=torch.full_like(pending, 4), probs=None, parents=parents, depth=2, width=2)


class States(Memory):
    """The states of each sequence, also in the copy that an engine opens."""

    def __init__(self):
        self.states = {}

    def prefill(self, start, texts, begins, hidden, counts):
        for i, (text, begin, count) in enumerate(zip(texts, begins, counts, strict=True)):
            self.states.setdefault(id(text), [text]).append((begin, hidden[i, :count]))

    def commit(self, tokens, hidden, counts):
        for (text, begin), states, count in zip(self.texts, hidden, counts.tolist(), strict=True):
            self.states[id(text)].append((begin, states[:count]))


def test_the_engine_gives_a_drafter_the_states_of_every_position():
    target, drafter = Target(tiny_model().double(), tokenizer=None), Recording()
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 9]]
    Engine(target, drafter, slots=3, chunk=3).generate(prompts, max_new_tokens=16)
    assert len(drafter.memory.states) == 3
    for text, *given in drafter.memory.states.values():
        assert [begin for begin, _ in given] == [sum(len(s) for _, s in given[:i]) for i in range(len(given))]
        states = torch.cat([states for _, states in given])
        expected = states_of(target.model, torch.tensor([text]), (0, 1))[0]
        torch.testing.assert_close(states, expected[: len(states)], atol=1e-10, rtol=1e-10)


def test_hooks_that_read_other_states_are_refused(monkeypatch):
    """Layers off by one: the target decodes, and a head that reads them is refused."""
    own = AuxLayers.__init__

    def off_by_one(self, model):
        own(self, model)
        self.layers = torch.nn.ModuleList([*self.layers[1:], self.layers[0]])

    monkeypatch.setattr(AuxLayers, "__init__", off_by_one)
    target = Target(tiny_model(), tokenizer=None)
    target.aux_layers.check((), target.name)
    with pytest.raises(UserError, match="hidden states"):
        target.aux_layers.check((0, 1), target.name)


def test_layers_outside_the_target_are_refused(target):
    target.aux_layers.check((0, 1), "a target")
    with pytest.raises(UserError, match="2 layers"):
        target.aux_layers.check((1, 2), "a target")
