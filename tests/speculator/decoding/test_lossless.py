"""No drafter changes the target's output: greedy tokens are identical, sampled tokens keep the distribution."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import CONFIGS, MisstatedHead, Oracle, tiny_block_head, tiny_head, tiny_model
from drafters import DRAFT_TOKENS, HEADS, SHAPES, make_drafter
from enumeration import chi_square_p, joint_distribution
from torch.utils._python_dispatch import TorchDispatchMode

from speculator import (
    Candidates,
    Chain,
    DraftModelDrafter,
    Engine,
    HeadDrafter,
    Sampling,
    Target,
    Tree,
    generate,
)
from speculator.decoding import verify as rules
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import draw, uniforms

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1], [3, 3, 4]]
# Their grouped matrix products exist in float32 only.
SINGLE = ("mixtral", "qwen3_moe", "gpt_oss")
NAMES = [
    "none",
    *(f"{source}-{shape}" for source in ("head", "model") for shape in SHAPES),
    *(
        f"{source}-{shape}"
        for source in HEADS
        if "dflash" not in source and source != "head"
        for shape in ("chain", "tree")
    ),
    "dflash2-chain",
    *(f"{source}-{shape}" for source in ("attention", "block", "mtp") for shape in ("candidates", "fixed-tree")),
    "dflash-greedy-chain",
    "ngram",
    *(f"adaptive-{head}" for head in ("head", "attention", "block", "mtp")),
]


# ---- temperature 0


GREEDY = [
    "none",
    "head-chain",
    "head-tree",
    "head-candidates",
    "attention-tree",
    "block-chain",
    "block-tree",
    "dflash-tree",
    "dflash2-tree",
    "model-chain",
    "model-tree",
    "ngram",
    "pruned-chain",
    "pruned-tree",
    "adaptive-head",
    "adaptive-attention",
    "adaptive-block",
]
FEW = ["none", "head-tree", "attention-tree", "block-tree"]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        *((family, GREEDY if family == "llama" else FEW) for family in CONFIGS),
        ("llama", ["mtp-tree", "adaptive-mtp"]),
        *(pytest.param(family, GREEDY, marks=pytest.mark.soak) for family in CONFIGS),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-drafters",
)
def test_greedy_text_is_what_transformers_generates(family, names):
    dtype = torch.float32 if family in SINGLE else torch.float64
    model = tiny_model(family).to(dtype)
    expected = [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=17,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    target = Target(model, tokenizer=None)
    for name in names:
        for rows in (slice(0, 1), slice(0, 4)) if names is GREEDY or name == "none" else (slice(0, 4),):
            made = generate(target, make_drafter(name, target), PROMPTS[rows], max_new_tokens=17)
            assert made.tokens == expected[rows], name
    for rows in (slice(0, 1), slice(0, 4)):
        for wrong, per_step in ((False, 4.0), (True, 1.0)):
            # 17 tokens: the prefill's and four whole steps of four.
            made = generate(target, Oracle(expected[rows], wrong, PROMPTS), PROMPTS[rows], max_new_tokens=17)
            assert made.tokens == expected[rows]
            assert made.acceptance_length == per_step


# ---- above it


_DISTRIBUTIONS: dict = {}


def sampled_p_value(drafter, sampling, rule=None, rows: int | None = None, batch: int | None = None) -> float:
    """Test the joint distribution of the new tokens after the first, which the prefill gives.

    Under `match` fewer rows do: another test shows that every text is the one of plain decoding.
    """
    model = tiny_model(scale=2.0)
    key = replace(sampling, seed=0)
    if key not in _DISTRIBUTIONS:
        probs: dict[tuple[int, ...], float] = Counter()
        for tokens, probability in joint_distribution(model, PROMPTS[0], 3, sampling).items():
            probs[tokens[1:]] += probability
        _DISTRIBUTIONS[key] = probs
    target = Target(model, None)
    drafter = make_drafter(drafter, target) if isinstance(drafter, str) else drafter
    rows = rows or (6_000 if drafter is None or (rule or drafter.rules[0]) != "match" else 3_000)
    counts: Counter = Counter()
    for start in range(0, rows, batch or rows):
        own = replace(sampling, seed=sampling.seed + start)
        generation = generate(target, drafter, [PROMPTS[0]] * (batch or rows), own, rule=rule, max_new_tokens=3)
        counts.update(tuple(row[1:]) for row in generation.tokens)
    return chi_square_p(counts, _DISTRIBUTIONS[key], sum(counts.values()))


WARPERS = [Sampling(1.0, seed=3), Sampling(0.7, top_k=6, seed=5), Sampling(1.3, top_p=0.8, min_p=0.02, seed=7)]


# A few: `plainly_drawn` compares the texts of every drafter with the plain ones, and these follow the enumerated
# distribution under every warper. `make soak` has all.
DRAWN = ["head-tree", "dflash2-chain", "adaptive-block"]
SAMPLED = [
    pytest.param(number, name, marks=[pytest.mark.soak] * (name not in DRAWN), id=name)
    for number, name in enumerate(NAMES)
    if "adaptive" not in name and name != "none"  # every warper is tried without drafts below
]


@pytest.mark.parametrize(("number", "name"), SAMPLED)
def test_sampled_text_follows_the_enumerated_distribution(number, name):
    assert sampled_p_value(name, WARPERS[number % 3]) > 1e-4


@pytest.mark.parametrize("sampling", WARPERS, ids=["plain", "top-k", "top-p"])
@pytest.mark.parametrize(
    "name", ["none", *(pytest.param(name, marks=pytest.mark.soak) for name in ("head-chain", "model-candidates"))]
)
def test_every_warper_keeps_the_distribution(name, sampling):
    assert sampled_p_value(name, sampling) > 1e-4


CHAINS = [
    *(("block", name) for name in ("head-greedy-chain", "pruned-chain")),
    *(("rejection", f"{name}-chain") for name in ("attention", "pruned_block", "dflash")),
    *(pytest.param("block", name, marks=pytest.mark.soak) for name in ("model-chain", "ngram", "block-chain")),
    *(pytest.param("rejection", f"{name}-chain", marks=pytest.mark.soak) for name in ("head", "pruned", "block")),
]


@pytest.mark.parametrize(("rule", "name"), CHAINS)
def test_every_rule_of_a_chain_follows_the_enumerated_distribution(rule, name):
    assert sampled_p_value(name, WARPERS[0], rule=rule) > 1e-4


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("attention-chain", 3),
        *(
            pytest.param(name, batch, marks=pytest.mark.soak)
            for name in ("head-chain", "head-tree", "attention-chain")
            for batch in (1, 3)
            if (name, batch) != ("attention-chain", 3)
        ),
    ],
)
def test_small_batches_follow_the_enumerated_distribution(name, batch):
    assert sampled_p_value(name, WARPERS[1], rows=300, batch=batch) > 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "attention-candidates",
        "block-chain",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("head-chain", "attention-chain")),
    ],
)
def test_a_second_turn_follows_the_enumerated_distribution(name):
    """Slots are reused for a prompt with a common prefix, after the head has read draft tokens."""
    engine = Engine(Target(tiny_model(scale=2.0), None), make_drafter(name), slots=500)
    sampling, counts = WARPERS[1], Counter()
    for start in (0, 500):
        engine.generate([PROMPTS[0][:3]] * 500, replace(sampling, seed=start), max_new_tokens=4)
        before = engine.num_prefilled_tokens
        made = engine.generate([PROMPTS[0]] * 500, replace(sampling, seed=5000 + start), max_new_tokens=3)
        assert engine.num_prefilled_tokens - before < 500 * len(PROMPTS[0])
        counts.update(tuple(row[1:]) for row in made.tokens)
    expected: Counter = Counter()
    for tokens, probability in joint_distribution(tiny_model(scale=2.0), PROMPTS[0], 3, sampling).items():
        expected[tokens[1:]] += probability
    assert chi_square_p(counts, expected, 1000) > 1e-4


def test_a_draft_distribution_that_is_not_the_drawn_one_is_seen():
    assert sampled_p_value(MisstatedHead(tiny_head()), WARPERS[0], rule="block") < 1e-6


class Marginals(HeadDrafter):
    """A known-wrong block drafter: states the distribution of a token without its bias by the token before."""

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        draft.probs = noise.sampling.probs(self.memory._logits)
        return draft


class CutAtTheToken(HeadDrafter):
    """A known-wrong cut: drops a drawn token because of the token."""

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        likely = draft.probs.gather(2, draft.tokens[:, :, None])[:, :, 0] > 0.05
        draft.lengths = likely.long().cumprod(1).sum(1)
        return draft


@pytest.mark.parametrize(("wrong", "rule"), [(Marginals, "block"), (CutAtTheToken, "rejection")])
def test_a_wrong_block_drafter_is_seen(wrong, rule):
    head = tiny_block_head(Target(tiny_model(scale=2.0), None))
    assert sampled_p_value(wrong(head), WARPERS[0], rule=rule) < 1e-6


class ShiftedDistribution(HeadDrafter):
    """A known-wrong head: maps the draft vocabulary differently for tokens and for their distribution."""

    def propose(self, pending, noise, texts):
        draft = super().propose(pending, noise, texts)
        draft.tokens = (draft.tokens + 1) % draft.probs.shape[-1]
        return draft


def test_a_draft_vocabulary_that_tokens_and_distribution_do_not_share_is_seen():
    assert sampled_p_value(ShiftedDistribution(tiny_head(draft_tokens=DRAFT_TOKENS)), WARPERS[0], rule="block") < 1e-6


RULE_DRAFTS = {name: (-1, -1, 0) if name == "multi_candidate" else (-1, 0) for name in rules.REJECTION_RULES}


@pytest.mark.parametrize("rows", [200_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", RULE_DRAFTS)
def test_many_rows_of_each_rule_follow_the_target_distribution(name, rows):
    """The production functions in float32, uniforms and draws included: pairs of tokens, 256 cells."""
    parents = RULE_DRAFTS[name]
    size, chunk = 16, 100_000
    generator = torch.Generator().manual_seed(1)
    p_table, q_table = (torch.randn(size + 1, size, generator=generator).softmax(-1) for _ in range(2))
    seen = torch.zeros(size * size, dtype=torch.long)
    for start in range(0, rows, chunk):
        u = uniforms(torch.arange(start, start + chunk), torch.zeros(chunk, dtype=torch.long), 2 * len(parents) + 2)
        tokens: list[torch.Tensor] = []
        distributions: list[torch.Tensor] = []
        for node, parent in enumerate(parents):
            state = torch.full((chunk,), size) if parent < 0 else tokens[parent]  # the table's row: the last token
            probs = q_table[state]
            elders = [i for i in range(node) if parents[i] == parent]
            left = probs
            for elder in elders:
                left = left.scatter(1, tokens[elder][:, None], 0)
            tokens.append(draw(left, u[:, node]))
            distributions.append(probs)
        chain = parents == (-1, 0)
        draft = Draft(
            tokens=torch.stack(tokens, 1),
            lengths=torch.full((chunk,), len(parents)),
            probs=torch.stack(distributions, 1),
            parents=None if chain else torch.tensor(parents).expand(chunk, -1),
            depth=2,
            width=2,
        )
        seen += pairs(name, p_table, draft, u[:, len(parents) :])
    assert chi_square_of_pairs(seen, p_table) > 1e-4


def pairs(name, p_table, draft, u) -> torch.Tensor:
    """Count pairs of tokens that a rule emits; plain decoding draws the second one after a short path."""
    size, rows = p_table.shape[1], len(u)
    root = torch.full((rows, 1), size)
    p = p_table[torch.cat([root, draft.tokens], 1)]
    last, probs = rules.REJECTION_RULES[name](p, draft, u[:, :-1])
    following = draw(probs, u[:, -2])
    path = torch.cat([root, draft.tokens], 1).gather(1, draft.path(last))[:, 1:]
    kept = draft.depths.gather(1, last[:, None])[:, 0]
    first = torch.where(kept > 0, path[:, 0], following)
    # The second token: the draft's, the one after it, or plainly drawn where the first ended the step.
    plain = draw(p_table[first], u[:, -1])
    second = torch.where(kept > 1, path[:, 1], torch.where(kept == 1, following, plain))
    return torch.bincount(first * size + second, minlength=size * size)


def chi_square_of_pairs(seen, p_table) -> float:
    size = p_table.shape[1]
    probs = (p_table[size][:, None].double() * p_table[:size].double()).flatten()
    cells = {(i,): probability for i, probability in enumerate(probs.tolist())}
    return chi_square_p(Counter({(i,): n for i, n in enumerate(seen.tolist())}), cells, int(seen.sum()))


# ---- rows, cache and copies

MAIN = [
    *(name for name in NAMES if name not in GREEDY and "adaptive" not in name and "model-" not in name),
    *("none", "head-tree", "attention-tree", "model-tree", "ngram", "adaptive-attention"),
]


def others_in_soak(*names: str) -> list:
    """Every drafter; those without a name here run in `make soak`."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.soak) for name in NAMES]


@pytest.mark.parametrize("name", others_in_soak("none", "head-tree", "attention-tree", "ngram", "adaptive-attention"))
def test_a_row_does_not_depend_on_its_batch_mates(target, name):
    """Adaptive drafting is compared at temperature 0 only: its choice depends on the whole batch."""
    settings = [
        Sampling(1.0, seed=11),
        Sampling(0.0),
        Sampling(0.8, top_k=5, seed=12),
        Sampling(1.3, top_p=0.9, seed=13),
    ]
    if name.startswith("adaptive"):
        settings = [replace(each, temperature=0.0) for each in settings]
    drafter = make_drafter(name, target)
    together = generate(target, drafter, PROMPTS, settings, max_new_tokens=14).tokens
    alone = [
        generate(target, drafter, [prompt], [own], max_new_tokens=14).tokens[0]
        for prompt, own in zip(PROMPTS, settings, strict=True)
    ]
    backwards = generate(target, drafter, PROMPTS[::-1], settings[::-1], max_new_tokens=14).tokens
    assert together == alone == backwards[::-1]
    assert together == generate(target, drafter, PROMPTS, settings, max_new_tokens=14).tokens


@pytest.fixture(scope="module")
def plainly_drawn():
    """A target, and the settings and texts of plain decoding after each prompt."""
    target = Target(tiny_model().double(), tokenizer=None)
    settings = [replace(own, seed=own.seed + 22) for own in (*WARPERS, Sampling())]
    texts = [
        generate(target, None, [prompt], [own], max_new_tokens=18).tokens[0]
        for prompt, own in zip(PROMPTS, settings, strict=True)
    ]
    return target, settings, texts


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_a_drafter_leaves_the_sampled_text_as_plain_decoding_draws_it(plainly_drawn, name):
    """Also of requests that wait for a slot beside others."""
    target, settings, expected = plainly_drawn
    drafter = make_drafter(name, target)
    assert drafter.rules[0] == "match"
    made = Engine(target, drafter, slots=2).generate(PROMPTS, settings, max_new_tokens=18)
    assert made.tokens == expected
    assert made.acceptance_length > 1


CACHED = ["none", "head-tree", "model-tree", "attention-candidates", "mtp-chain"]
CACHED += ["block-fixed-tree", "dflash2-chain", "ngram", "adaptive-attention"]


@pytest.mark.parametrize("name", others_in_soak(*CACHED))
def test_after_every_step_the_cache_is_that_of_the_text(name):
    target = Target(tiny_model("gemma3"), tokenizer=None)  # full and sliding layers
    engine, texts = Engine(target, make_drafter(name, target), slots=len(PROMPTS)), [list(prompt) for prompt in PROMPTS]
    checked = 0

    def check(row: int, new: list[int], drafted: int) -> None:
        nonlocal checked
        texts[row] += new
        place = next(i for i, slot in enumerate(engine.scheduler.slots) if slot.request and slot.sequence == texts[row])
        tokens = torch.tensor([texts[row][:-1]])
        fresh = target.cache(1, tokens.shape[1])
        target.extend(fresh, tokens)
        for layer, expected in zip(engine.cache.layers, fresh.layers, strict=True):
            for mine, theirs in ((layer.keys, expected.keys), (layer.values, expected.values)):
                torch.testing.assert_close(mine[place, :, : tokens.shape[1]], theirs[0], atol=1e-4, rtol=1e-4)
        checked += 1

    engine.generate(PROMPTS, Sampling(1.0, seed=2), max_new_tokens=11, on_step=check)
    assert checked > 11


class Copies(TorchDispatchMode):
    """Operations that ask the device for a value."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1].split(".")[0]
        masked = name.startswith("index") and any(
            isinstance(part, torch.Tensor) and part.dtype == torch.bool
            for arg in args[1:]
            if isinstance(arg, list | tuple)
            for part in arg
        )
        if masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "temperature"),
    [*((name, 1.0) for name in MAIN), ("head-tree", 0.0), ("adaptive-attention", 0.0)],
)
def test_a_step_copies_to_the_host_once(target, name, temperature, monkeypatch):
    """Steps of 8 more tokens add one copy each."""
    counts = Counter()
    for method in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, method)

        def counted(self, *args, _original=original, **kwargs):
            counts["python"] += 1
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, counted)

    def copies(count: int) -> tuple[int, int]:
        counts.clear()
        with Copies() as dispatched:
            generation = generate(
                target, make_drafter(name, target), [PROMPTS[0]], Sampling(temperature), max_new_tokens=count
            )
        return counts["python"] + len(dispatched.names), len(generation.steps[0])

    (few, few_steps), (many, many_steps) = copies(4), copies(12)
    assert many_steps > few_steps
    assert many - few == many_steps - few_steps


def test_the_copy_counter_has_teeth():
    with Copies() as copies:
        torch.ones(3)[torch.tensor([True, False, True])].sum().item()
    assert len(copies.names) == 2


@pytest.mark.parametrize("shape", [Chain(4), Tree((2, 2, 1, 1), nodes=14), Candidates((2, 1, 1, 1))])
def test_a_model_that_drafts_for_itself_is_always_right(shape):
    """Errors in the draft model's cache would lower the acceptance length but change no token."""
    target = Target(tiny_model().double(), tokenizer=None)
    drafter = DraftModelDrafter(Target(tiny_model().double(), tokenizer=None), target, shape)
    assert generate(target, drafter, PROMPTS, max_new_tokens=21).acceptance_length == 5
