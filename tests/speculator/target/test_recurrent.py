"""Recurrent layers: states roll back exactly, and nothing but the rows' own tokens moves them."""

import copy
from collections import Counter
from dataclasses import replace
from functools import partial

import httpx
import pytest
import torch
from conftest import (
    RECURRENT,
    RECURRENT_RUNS,
    VOCAB,
    Oracle,
    tiny_head,
    tiny_model,
    tiny_mtp_head,
    tiny_tokenizer,
)
from drafters import make_drafter
from enumeration import chi_square_p, distance_of_runs, joint_distribution
from serving_here import serving
from transformers import AutoModelForCausalLM

from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    Engine,
    HeadDrafter,
    MLPSpeculator,
    MLPSpeculatorConfig,
    NgramDrafter,
    Sampling,
    Target,
    UserError,
    generate,
)
from speculator.decoding.scheduler import Scheduler
from speculator.target.recurrent.layer import RecurrentLayer
from speculator.target.recurrent.recurrences import delta_rule

pytestmark = RECURRENT_RUNS
PROMPTS = [[(7 * i + 3 * n) % VOCAB for i in range(n)] for n in (5, 1, 13, 4, 23, 2, 31, 9)]
KINDS = ["qwen3_5", "lfm2", "falcon_h1", "jamba"]
"""A delta rule; a convolution only, attention and state-space in one layer, Mamba 1."""
FEW = [KINDS[0], *(pytest.param(family, marks=pytest.mark.soak) for family in KINDS[1:])]


def written(model, count: int, prompts=PROMPTS) -> list[list[int]]:
    """Greedy completions by transformers."""
    rows = [torch.tensor([prompt]) for prompt in prompts]
    how = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return [model.generate(row, attention_mask=torch.ones_like(row), **how)[0, row.shape[1] :].tolist() for row in rows]


class Mistaken(Oracle):
    """Drafts four tokens, of which the first n are right; n runs over 0..4, differently for each row."""

    num_speculative_tokens = nodes = 4

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        rows = []
        for text in texts:
            _, prompt = self.memory.known[id(text)]
            number, at = self.prompts.index(prompt), len(text) - len(prompt)
            right = (self.continuations[number] + [0] * 8)[at : at + 4]
            wrong_from = (at + number) % 5
            rows.append([(token + (i >= wrong_from)) % VOCAB for i, token in enumerate(right)])
        draft.tokens, draft.lengths, draft.depth = torch.tensor(rows), torch.full_like(pending, 4), 4
        return draft


def poor_drafters(target: Target, expected: list[list[int]]) -> dict:
    """Drafters whose tokens are rejected at every position of a draft."""
    return {
        "none": None,
        "right up to each position": Mistaken(expected, prompts=PROMPTS),
        "random head, tree": HeadDrafter(tiny_head(), Candidates((3, 2, 1))),
        "n-gram lookup": NgramDrafter(3),
        "draft model": DraftModelDrafter(Target(tiny_model(), None), target, 3),
    }


@pytest.mark.parametrize("count", [12, pytest.param(96, marks=pytest.mark.soak)])
@pytest.mark.parametrize("family", RECURRENT)
def test_greedy_text_is_what_transformers_generates(family, count):
    """Ragged prompts in chunks, joining and leaving. Families outside `KINDS` have fewer drafters and prompts."""
    model = tiny_model(family)
    prompts = PROMPTS if family in KINDS else PROMPTS[:4]
    expected = written(model, count, prompts)
    target = Target(model, tokenizer=None)
    drafters = poor_drafters(target, expected)
    for name in drafters if family in KINDS else ("none", "right up to each position", "random head, tree"):
        drafter = drafters[name]
        made = Engine(target, drafter, slots=3, chunk=8).generate(prompts, max_new_tokens=count)
        assert made.tokens == expected, name


DRAFTERS = ["model-chain", "head-tree", "attention-candidates", "block-tree", "adaptive-head"]


@pytest.mark.parametrize("family", FEW)
def test_every_drafter_leaves_greedy_text_as_it_is(family):
    model = tiny_model(family)
    expected, target = written(model, 16), Target(model, tokenizer=None)
    own = ["mtp-candidates"] if family == "qwen3_5" else []  # an MTP layer is of its target's kind
    for name in (*DRAFTERS, *own):
        made = generate(target, make_drafter(name, target), PROMPTS, max_new_tokens=16, max_batch_size=3)
        assert made.tokens == expected, name


@pytest.mark.soak  # the exact distribution of every run of such an engine is compared below
@pytest.mark.parametrize("shape", [Chain(2), Candidates((3, 2))], ids=["chain", "tree"])
@pytest.mark.parametrize("family", KINDS)
def test_sampled_text_follows_the_enumerated_distribution(family, shape):
    assert sampled_p_value(family, HeadDrafter(tiny_head(), shape)) > 1e-4


@pytest.mark.parametrize("shape", [Chain(3), Candidates((3, 2, 1))], ids=["chain", "tree"])
def test_an_mtp_layer_leaves_sampled_text_as_plain_decoding_draws_it(shape):
    """Requests of other seeds wait for a slot beside it; most drafts are rejected."""
    target = Target(tiny_model("qwen3_5").double(), tokenizer=None)
    settings = [Sampling(0.6, top_k=6, seed=20 + number) for number in range(len(PROMPTS))]
    engine = Engine(target, HeadDrafter(tiny_mtp_head(target), shape), slots=3, chunk=8)
    made = engine.generate(PROMPTS, settings, max_new_tokens=24)
    plain = [generate(target, None, [p], [own], max_new_tokens=24) for p, own in zip(PROMPTS, settings, strict=True)]
    assert made.tokens == [each.tokens[0] for each in plain]
    assert 1.05 < made.acceptance_length < 2


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (Chain(2), "rejection"),
        pytest.param(Chain(2), "block", marks=pytest.mark.soak),
        pytest.param(Candidates((3, 2)), "multi_candidate", marks=pytest.mark.soak),
    ],
)
def test_sampled_text_of_an_mtp_layer_follows_the_enumerated_distribution(shape, rule):
    head = tiny_mtp_head(Target(tiny_model("qwen3_5", scale=2.0), tokenizer=None))
    assert sampled_p_value("qwen3_5", HeadDrafter(head, shape), rule=rule) > 1e-4


def sampled_p_value(family: str, drafter, rows: int = 2000, rule: str | None = None) -> float:
    """Test the joint distribution of the new tokens after the first, which the prefill gives."""
    model, sampling = tiny_model(family, scale=2.0), Sampling(1.0, top_k=6, seed=3)
    expected: Counter = Counter()
    for tokens, probability in joint_distribution(model, PROMPTS[0], 3, sampling).items():
        expected[tokens[1:]] += probability
    target = Target(model, tokenizer=None)
    made = generate(target, drafter, [PROMPTS[0]] * rows, sampling, rule=rule, max_new_tokens=3)
    return chi_square_p(Counter(tuple(row[1:]) for row in made.tokens), expected, rows)


def small(family: str = "qwen3_5") -> tuple[Target, MLPSpeculator]:
    """A target of four tokens whose states last, and a head for it."""
    torch.manual_seed(3)
    config = copy.deepcopy(RECURRENT[family])
    config.vocab_size = 4
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data *= 4
        if name.endswith("A_log"):
            weight.data.fill_(-3)
    head = MLPSpeculator(MLPSpeculatorConfig(vocab_size=4, emb_dim=32, inner_dim=8, n_predict=2))
    return Target(model, tokenizer=None), head


def distance(target: Target, drafter: HeadDrafter, rule: str, monkeypatch) -> float:
    """Total variation of the engine's texts in all its runs, beside a longer prompt with the same prefix."""
    prompt, sampling = [0, 1, 0, 2, 3, 1, 2, 2, 0, 3, 1], Sampling(1.0, top_k=2)

    def run() -> tuple[int, ...]:
        engine = Engine(target, drafter, slots=2, rule=rule)
        engine.submit([*prompt[:-1], 2, 0, 3, 1, 3], max_new_tokens=1)
        request = engine.submit(prompt, sampling, max_new_tokens=4)
        engine.run()
        return tuple(request.tokens)

    return distance_of_runs(monkeypatch, run, joint_distribution(target.model, prompt, 4, sampling))


RULES = [
    pytest.param(Chain(2), "match", id="match"),
    pytest.param(Candidates((2, 1)), "match", id="match-tree"),
    *(pytest.param(Chain(2), rule, id=rule, marks=pytest.mark.soak) for rule in ("rejection", "block")),
    pytest.param(Candidates((2, 1)), "multi_candidate", id="multi_candidate", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("shape", "rule"), RULES)
@pytest.mark.parametrize("family", FEW)
def test_every_run_of_the_engine_adds_up_to_the_targets_distribution(family, shape, rule, monkeypatch):
    target, head = small(family)
    assert (
        distance(target, HeadDrafter(head, shape), rule, monkeypatch) < 1e-4
    )  # rounding; a wrong state gives 0.05 and more


# ---- known-wrong variants


def not_rolled_back(monkeypatch):
    kept = RecurrentLayer._kept
    monkeypatch.setattr(
        RecurrentLayer, "_kept", lambda self, counts: kept(self, counts if self._counts is not None else None)
    )


def one_too_few(monkeypatch):
    kept = RecurrentLayer._kept

    def fewer(self, counts):
        return kept(self, counts if counts is None or self._counts is not None else counts - 1)

    monkeypatch.setattr(RecurrentLayer, "_kept", fewer)


def convolution_not_gathered(monkeypatch):
    commit = RecurrentLayer.commit

    def last(self, counts):
        commit(self, counts)
        size = self.states[0].shape[-1]
        self._committed[0].copy_(self._inputs[..., -size:])

    monkeypatch.setattr(RecurrentLayer, "commit", last)


def decay_in_padding(monkeypatch):
    def decaying(function, step, *args, **kwargs):
        kwargs["beta"] = kwargs["beta"].where(step.keep[:, :, None], 0.0) if step.keep is not None else kwargs["beta"]
        return delta_rule(function, replace(step, keep=None), *args, **kwargs)

    run = RecurrentLayer.run
    wrong = lambda self, rule, *args, **given: run(self, partial(decaying, rule.args[0]), *args, **given)  # noqa: E731
    monkeypatch.setattr(RecurrentLayer, "run", wrong)


WRONG = [not_rolled_back, one_too_few, convolution_not_gathered, decay_in_padding]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_states_change_the_text(wrong, monkeypatch):
    model = tiny_model("qwen3_5")
    expected, target = written(model, 24), Target(model, tokenizer=None)
    wrong(monkeypatch)
    engine = Engine(target, Mistaken(expected, prompts=PROMPTS), slots=3, chunk=8)
    assert engine.generate(PROMPTS, max_new_tokens=24).tokens != expected


def prefix_shared_past_a_boundary(monkeypatch):
    monkeypatch.setattr("speculator.decoding.rows.Scheduler", lambda slots, recurrent: Scheduler(slots))


@pytest.mark.parametrize("wrong", [*WRONG, prefix_shared_past_a_boundary])
def test_wrong_states_change_the_exact_distribution(wrong, monkeypatch):
    target, head = small()
    wrong(monkeypatch)
    assert distance(target, HeadDrafter(head, Chain(2)), "match", monkeypatch) > 0.02


@pytest.mark.parametrize("wrong", WRONG)
def test_the_probe_refuses_wrong_states(wrong, monkeypatch):
    model = tiny_model("qwen3_5")
    wrong(monkeypatch)
    with pytest.raises(UserError, match="verified exactly"):
        Target(model, tokenizer=None)


# ---- prefixes


SHARED = [(5 * i) % VOCAB for i in range(20)]
SIBLINGS = [[*SHARED, 1, 2, 3], [*SHARED, 4], [*SHARED[:13], 30, 30], [*SHARED, 1, 2, 9, 9]]


@pytest.mark.parametrize("head", [None, "mlp", "eagle3"])
def test_prefixes_are_shared_where_a_state_exists(head):
    """Prompts in flight copy the state at their prefix's end; the next turn starts from the state of the last one."""
    target = Target(tiny_model("qwen3_5").double(), tokenizer=None)
    drafter = head and HeadDrafter(tiny_head(architecture=head).double(), Chain(2))
    expected = written(target.model, 9, SIBLINGS)
    for chunk in (5, 64):
        engine = Engine(target, drafter, slots=4, chunk=chunk)
        assert engine.generate(SIBLINGS, max_new_tokens=9).tokens == expected
        assert engine.num_prefilled_tokens < sum(map(len, SIBLINGS)) - 30
        before = engine.num_prefilled_tokens
        turns = [prompt + made + [7] for prompt, made in zip(SIBLINGS, expected, strict=True)]
        assert engine.generate(turns, max_new_tokens=9).tokens == written(target.model, 9, turns)
        assert engine.num_prefilled_tokens - before < sum(map(len, turns)) - (30 if head is None else 0)


def test_a_server_answers_with_a_shared_system_prompt_exactly():
    """At once, and again when the slots that read the prompt have gone on."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    target = Target(tiny_model("qwen3_5").double(), tokenizer)
    expected = written(target.model, 9, SIBLINGS)
    with serving(target, HeadDrafter(tiny_head().double(), Chain(2))) as (url, _), httpx.Client() as client:
        body = {"max_tokens": 9, "temperature": 0, "return_token_ids": True}
        for prompts in (SIBLINGS, *([each] for each in SIBLINGS)):
            answer = client.post(f"{url}/v1/completions", json={"prompt": prompts, **body}, timeout=60).json()
            made = [choice["token_ids"] for choice in answer["choices"]]
            assert made == [expected[SIBLINGS.index(prompt)] for prompt in prompts]


def test_a_prefix_without_a_state_is_not_shared(monkeypatch):
    target = Target(tiny_model("qwen3_5").double(), tokenizer=None)
    expected = written(target.model, 9, SIBLINGS)
    prefix_shared_past_a_boundary(monkeypatch)
    assert Engine(target, slots=4).generate(SIBLINGS, max_new_tokens=9).tokens != expected


def test_states_that_ran_ahead_are_not_reused():
    """A cancelled request and a last draft that was cut off leave states beyond their texts."""
    target = Target(tiny_model("qwen3_5").double(), tokenizer=None)
    expected = written(target.model, 12, SIBLINGS[:1])[0]
    engine = Engine(target, Oracle([expected]), slots=1)
    assert engine.generate(SIBLINGS[:1], max_new_tokens=7).tokens == [expected[:7]]  # 1 + 4 + 2 of the last 4
    turn = SIBLINGS[0] + expected[:7]
    engine.rows.drafter = None
    assert engine.generate([turn], max_new_tokens=5).tokens == [expected[7:]]
    request = engine.submit(turn, max_new_tokens=9)
    engine.step()
    engine.step()
    request.cancel()
    assert engine.generate([turn], max_new_tokens=5).tokens == [expected[7:]]


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_depends_on_kept_tokens_only(family):
    """Identity steps leave a state as it is, bit for bit, whatever the tokens."""
    target = Target(tiny_model(family), tokenizer=None)
    tokens = torch.tensor([PROMPTS[4][:6], PROMPTS[6][:6]])
    states = []
    for draft in (tokens, tokens.flip(1)):
        cache = target.cache(2, 32)
        target.extend(cache, tokens, counts=[6, 4])
        cache.commit(torch.tensor([6, 4]))
        before = [state.clone() for layer in cache.recurrent.values() for state in layer.states]
        cache.select(0, 2, 6)
        target.extend(cache, torch.cat([tokens[:, :2], draft[:, 2:]], 1))
        cache.commit(torch.tensor([0, 2]))
        states.append([state for layer in cache.recurrent.values() for state in layer.states])
        assert all(torch.equal(new[0], old[0]) for new, old in zip(states[-1], before, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


@pytest.mark.parametrize("family", RECURRENT)
def test_packed_documents_do_not_see_each_other(family):
    target = Target(tiny_model(family), tokenizer=None)
    tokens = torch.tensor([SIBLINGS[0][:20], PROMPTS[6][:20]])
    packed = target.hidden(tokens, torch.tensor([[0] * 9 + [1] * 3 + [2] * 8, [4] * 20]))
    for row, start, stop in ((0, 0, 9), (0, 9, 12), (0, 12, 20), (1, 0, 20)):
        alone = target.hidden(tokens[row : row + 1, start:stop])[0]
        # Kernels differ by up to 1.2e-5 (in Mamba); a document that sees another one differs by 2.
        torch.testing.assert_close(packed[row, start:stop], alone, atol=1e-4, rtol=1e-4)


def test_idle_rows_of_a_single_token_step_keep_their_states():
    """Captured steps run idle rows along, which commit nothing."""
    target = Target(tiny_model("qwen3_5"), tokenizer=None)
    cache = target.cache(2, 32)
    target.extend(cache, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    cache.commit(torch.tensor([3, 3]))
    states = [state for layer in cache.recurrent.values() for state in layer.states]
    before = [state.clone() for state in states]
    cache.select(0, 2, 3)
    target.extend(cache, torch.tensor([[7], [8]]))
    cache.commit(torch.tensor([0, 1]))
    for state, old in zip(states, before, strict=True):
        assert torch.equal(state[0], old[0])
        assert not torch.equal(state[1], old[1])
