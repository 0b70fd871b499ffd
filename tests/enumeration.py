"""Exact distributions of what an accept rule emits: every draft, every accept pattern, nothing sampled.

A *world* is a pair of next-token distributions (p the target's, q the drafter's) over every prefix of a draft. A
*drafting* is how a draft comes about: a list of (tokens, chance) with the distributions that the drafter claims. A rule
is fed every draft and every cell of its uniforms, and the distribution of the emitted tokens, completed by p to depth +
1, is compared with p's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from speculator import MLPSpeculator, MLPSpeculatorConfig, Target
from speculator.decoding.draft import Draft
from speculator.decoding.sampling import Noise, Sampling, draw
from speculator.decoding.verify import REJECTION_RULES, match

Prefix = tuple[int, ...]


@dataclass
class World:
    """p[prefix], q[prefix]: distributions over `size` tokens for every prefix of up to `depth` tokens."""

    size: int
    depth: int
    p: dict[Prefix, torch.Tensor]
    q: dict[Prefix, torch.Tensor]


KINDS = ("plain", "zeros", "one-hot", "equal", "disjoint")


def world(seed: int, size: int, depth: int, kind: str) -> World:
    """Random distributions of a kind: with zeros in them, one-hot, p = q, or with disjoint supports."""
    generator = torch.Generator().manual_seed(seed)

    def probs(side: int) -> torch.Tensor:
        weights = torch.rand(size, generator=generator, dtype=torch.float64) ** 3 + 1e-3
        if kind == "zeros":
            weights[torch.randint(size, (1,), generator=generator)] = 0
        if kind == "one-hot":
            weights = torch.nn.functional.one_hot(weights.argmax(), size).double()
        if kind == "disjoint":
            half = torch.arange(size) < size // 2 + 1
            weights = weights * (half if side else ~half)
        return weights / weights.sum()

    prefixes = [prefix for n in range(depth + 1) for prefix in product(range(size), repeat=n)]
    p = {prefix: probs(0) for prefix in prefixes}
    q = {prefix: probs(1) for prefix in prefixes}
    return World(size, depth, p, p if kind == "equal" else q)


@dataclass
class Case:
    """One draft that may come about.

    Attributes:
        tokens: of each node; parents: index of each node's parent, -1 at the root.
        distributions: what each node's token is said to have been drawn from, or None for a deterministic draft.
        chance: how probable this draft is.
        length: nodes really drafted.
    """

    tokens: Prefix
    parents: Prefix
    distributions: list[torch.Tensor] | None
    chance: float
    length: int

    def path(self, node: int) -> Prefix:
        """The tokens from the root to a node, its own included; of -1: none."""
        return () if node < 0 else (*self.path(self.parents[node]), self.tokens[node])

    def level(self, node: int) -> int:
        return len(self.path(node)) - 1

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node and i < self.length]


CHAINS = {depth: tuple(range(-1, depth - 1)) for depth in range(1, 4)}


def sampled(w: World, parents: Prefix) -> Iterator[Case]:
    """Every draft whose siblings are drawn from their parent's q one after the other, without replacement."""

    def grow(tokens: Prefix, distributions: list[torch.Tensor], chance: float) -> Iterator[Case]:
        node = len(tokens)
        if node == len(parents):
            yield Case(tokens, parents, distributions, chance, node)
            return
        so_far = Case(tokens, parents[:node], None, chance, node)
        probs = w.q[so_far.path(parents[node])]
        left = probs.clone()
        left[[tokens[i] for i in so_far.children(parents[node])]] = 0
        left = left / left.sum() if left.sum() > 0 else left
        if (
            left.sum() == 0
        ):  # the elders used the distribution up: the drafter gives some token that its distribution can't
            yield from grow((*tokens, 0), [*distributions, probs * 0], chance)
            return
        for token in range(w.size):
            if left[token] > 0:
                yield from grow((*tokens, token), [*distributions, probs], chance * left[token].item())

    return grow((), [], 1.0)


def deterministic(w: World, parents: Prefix) -> Iterator[Case]:
    """The one draft whose siblings are the likeliest tokens of their parent's q."""
    tokens: Prefix = ()
    for node in range(len(parents)):
        so_far = Case(tokens, parents[:node], None, 1.0, node)
        elders = so_far.children(parents[node])
        probs = w.q[so_far.path(parents[node])]
        tokens = (*tokens, probs.argsort(descending=True, stable=True)[len(elders)].item())
    yield Case(tokens, parents, None, 1.0, len(parents))


# ---- where each rule changes its mind, worked out apart from the rule

Breaks = list[set[float]]


def token_breaks(w: World, case: Case) -> Breaks:
    """u_i against p/q of each token of a chain."""
    breaks: Breaks = []
    for i, token in enumerate(case.tokens):
        p = w.p[case.path(i - 1)][token].item()
        q = 1.0 if case.distributions is None else case.distributions[i][token].item()
        breaks.append({p / q} if q > 0 else set())
    return breaks


def block_breaks(w: World, case: Case) -> Breaks:
    """u_i against h_i of each prefix of a chain."""
    weight, breaks = 1.0, []
    for i, token in enumerate(case.tokens):
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), w.size).double()
        q = one_hot if case.distributions is None else case.distributions[i]
        weight = min(1.0, weight * w.p[case.path(i - 1)][token].item() / q[token].item())
        if i + 1 == case.length:
            breaks.append({weight})
            continue
        nxt = one_hot if i + 1 >= len(case.tokens) else None
        if nxt is None:
            nxt = (
                torch.nn.functional.one_hot(torch.tensor(case.tokens[i + 1]), w.size).double()
                if case.distributions is None
                else case.distributions[i + 1]
            )
        surplus = (weight * w.p[case.path(i)] - nxt).clamp_min(0).sum().item()
        rest = surplus + 1 - weight
        breaks.append({surplus / rest if rest > 0 else 1.0})
    return breaks


def match_breaks(w: World, case: Case) -> Breaks:
    """u of a depth against the bounds of all tokens' intervals, at whatever node it is used."""
    breaks: Breaks = [set() for _ in range(len(case.tokens) + 1)]
    for node in range(-1, len(case.tokens)):
        breaks[case.level(node) + 1] |= set(w.p[case.path(node)].cumsum(0).tolist())
    return breaks


def recursive_breaks(w: World, case: Case) -> Breaks:
    """u of a child against t/s after its elders were refused."""
    breaks: Breaks = [set() for _ in case.tokens]
    for node in range(-1, len(case.tokens)):
        t, s = w.p[case.path(node)].clone(), None
        for child in case.children(node):
            token = case.tokens[child]
            if s is None:
                if case.distributions is None:
                    s = torch.nn.functional.one_hot(torch.tensor(token), w.size).double()
                else:
                    s = case.distributions[child].clone()
            if s[token] <= 0:
                continue
            breaks[child].add((t[token] / s[token]).item())
            left = (t - s).clamp_min(0)
            t = left / left.sum() if left.sum() > 1e-30 else t
            s[token] = 0
            s = s / s.sum() if s.sum() > 0 else s
    return breaks


def _cells(breaks: set[float]) -> list[tuple[float, float]]:
    """(a uniform inside, the measure) of each cell of [0, 1).

    The uniform is near one end of the cell or the other, so that a rule with thresholds of its own is seen.
    """
    bounds = sorted({0.0, 1.0, *(b for b in breaks if 0 < b < 1)})
    return [(a + (b - a) * (0.001 if hash((a, b)) % 2 else 0.999), b - a) for a, b in pairwise(bounds)]


Rule = Callable[[torch.Tensor, Draft, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Outcome:
    """What a rule did over everything that can happen."""

    total_variation: float
    """Between the distribution of the emitted tokens, completed to depth + 1, and the target's."""
    kept: float
    """Draft tokens kept, in the mean."""


def outcome(
    rule: Rule, w: World, cases: list[Case], find_breaks: Callable[[World, Case], Breaks], shared: bool = False
) -> Outcome:
    """Run a rule over all drafts and all cells of its uniforms.

    With `shared` one uniform serves every test, as in a decoder that reseeds before each of them.
    """
    tokens, parents, distributions, targets, uniforms, chances, lengths = [], [], [], [], [], [], []
    for case in cases:
        breaks = find_breaks(w, case)
        if shared:
            everything = set().union(*breaks)
            cells = [((u,) * len(breaks), measure) for u, measure in _cells(everything)]
        else:
            cells = []
            for combination in product(*(_cells(b) for b in breaks)):
                measure = 1.0
                for _, part in combination:
                    measure *= part
                cells.append((tuple(u for u, _ in combination), measure))
        target = torch.stack([w.p[case.path(node)] for node in range(-1, len(case.tokens))])
        for u, measure in cells:
            tokens.append(case.tokens)
            parents.append(case.parents)
            lengths.append(case.length)
            targets.append(target)
            uniforms.append(u)
            chances.append(case.chance * measure)
            if case.distributions is not None:
                distributions.append(torch.stack(case.distributions))
    count = len(parents[0])
    is_chain = all(tuple(each) == tuple(range(-1, count - 1)) for each in parents)
    different = {case.parents: case for case in cases}.values()
    depth = max(case.level(node) + 1 for case in different for node in range(count))
    width = max(len(case.children(node)) for case in cases for node in range(-1, count))
    draft = Draft(
        tokens=torch.tensor(tokens),
        lengths=torch.tensor(lengths),
        probs=torch.stack(distributions) if distributions else None,
        parents=None if is_chain else torch.tensor(parents),
        depth=depth,
        width=width,
    )
    last, probs = rule(torch.stack(targets), draft, torch.tensor(uniforms, dtype=torch.float64))
    probs = probs / probs.sum(-1, keepdim=True)
    chance = torch.tensor(chances, dtype=torch.float64)
    path, kept = draft.path(last), draft.depths.gather(1, last[:, None])[:, 0]
    emitted = torch.cat([torch.zeros(len(tokens), 1, dtype=torch.long), draft.tokens], 1).gather(1, path)
    joint: dict[Prefix, float] = {}
    for row, n, mass, following in zip(emitted.tolist(), kept.tolist(), chance.tolist(), probs, strict=True):
        for token, share in enumerate(following.tolist()):
            if share > 0 and mass > 0:
                key = (*row[1 : n + 1], token)
                joint[key] = joint.get(key, 0.0) + mass * share
    exact = _complete(w, {(): 1.0}, depth + 1)
    made = _complete(w, joint, depth + 1)
    gap = 0.5 * sum(abs(made.get(key, 0.0) - exact.get(key, 0.0)) for key in made.keys() | exact.keys())
    return Outcome(gap, (chance * kept).sum().item())


def _complete(w: World, joint: dict[Prefix, float], length: int) -> dict[Prefix, float]:
    """Extend emitted prefixes by the target's own distribution, which the next steps would draw from."""
    for n in range(length):
        grown: dict[Prefix, float] = {}
        for prefix, mass in joint.items():
            if len(prefix) > n:
                grown[prefix] = grown.get(prefix, 0.0) + mass
                continue
            for token, share in enumerate(w.p[prefix].tolist()):
                if share > 0:
                    key = (*prefix, token)
                    grown[key] = grown.get(key, 0.0) + mass * share
        joint = grown
    return joint


# ---- what real models say


def joint_distribution(model, prompt: list[int], count: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The exact distribution of `count` sampled tokens, by enumerating the model."""
    distributions = {(): 1.0}
    for _ in range(count):
        prefixes = list(distributions)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes]), use_cache=False).logits[:, -1]
        rows = sampling.probs(logits.double())
        distributions = {
            (*prefix, token): distributions[prefix] * row[token].item()
            for prefix, row in zip(prefixes, rows, strict=True)
            for token in range(len(row))
            if row[token] > 0
        }
    return distributions


def chi_square_p(counts: Counter, probs: dict, total: int) -> float:
    """Goodness of fit, cells with fewer than 5 expected merged."""
    cells, rest, rest_seen = [], 0.0, 0
    for outcome, probability in probs.items():
        if probability * total >= 5:
            cells.append((counts[outcome], probability * total))
        else:
            rest, rest_seen = rest + probability * total, rest_seen + counts[outcome]
    if rest >= 5:
        cells.append((rest_seen, rest))
    assert len(cells) > 2, "too few samples: with so few cells, hardly any difference is seen"
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


# ---- a decoder run in every way in which its draws and tests can fall out


def every_run(decode: Callable[[Callable[[list[float]], int]], Prefix]) -> dict[Prefix, float]:
    """The exact distribution of what `decode(pick)` gives, where `pick(chances)` says which of some things happens."""
    found: dict[Prefix, float] = {}
    scripts: list[list[int]] = [[]]
    while scripts:
        script, chance, at = scripts.pop(), 1.0, 0

        def pick(chances: list[float], script=script) -> int:
            nonlocal chance, at
            if at == len(script):
                possible = [i for i, each in enumerate(chances) if each > 0]
                scripts.extend([*script, i] for i in possible[1:])
                script.append(possible[0])
            at += 1
            chance *= chances[script[at - 1]]
            return script[at - 1]

        text = decode(pick)
        found[text] = found.get(text, 0.0) + chance
    return found


def distance_of_runs(
    monkeypatch, run: Callable[[], Prefix], exact: dict[Prefix, float], rules: dict[str, Rule] = REJECTION_RULES
) -> float:
    """Total variation between the texts that an engine makes in every run of `run` and the exact distribution."""

    def decode(pick: Callable[[list[float]], int]) -> Prefix:
        with monkeypatch.context() as patch:
            branching(patch, pick, rules)
            return run()

    made = every_run(decode)
    assert abs(sum(made.values()) - 1) < 1e-6
    return 0.5 * sum(abs(made.get(text, 0) - exact.get(text, 0)) for text in made.keys() | exact.keys())


def sampled_match(p: torch.Tensor, draft: Draft, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`match` as a rule of uniforms: u[:, d] samples the target's tokens at depth d."""
    u = u.gather(1, draft.depths) if draft.parents is not None else u[:, : p.shape[1]]
    samples = draw(p.flatten(0, 1), u.flatten()).view(p.shape[:2])
    last, following = match(samples, draft)
    return last, torch.zeros_like(p[:, 0]).scatter_(1, following[:, None], 1)


RULES: dict[str, Rule] = {**REJECTION_RULES, "match": sampled_match}
BREAKS = {
    "match": match_breaks,
    "rejection": token_breaks,
    "block": block_breaks,
    "multi_candidate": recursive_breaks,
}
"""Of each rule of `RULES`: the uniforms at which it changes its mind."""


def at_rows(draft: Draft, index: torch.Tensor) -> Draft:
    """These rows of a draft."""
    tensors = ("tokens", "lengths", "probs", "parents")
    return replace(draft, **{each: value[index] for each in tensors if (value := getattr(draft, each)) is not None})


def branching(monkeypatch, pick: Callable[[list[float]], int], rules: dict[str, Rule]) -> None:
    """Let the engine's and the shapes' draws, and the accept rules, fall out as `pick` says, not by their uniforms.

    Under `match` the target's own tokens do; drafts are then made of scores without noise.
    """

    def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        return torch.tensor([pick((row / row.sum()).tolist()) for row in probs])

    def branched(name: str, rule: Rule) -> Rule:
        def apply(p: torch.Tensor, draft: Draft, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [one_row(p[i : i + 1], draft, i) for i in range(len(p))]
            return torch.stack([last for last, _ in rows]), torch.stack([rest for _, rest in rows])

        def one_row(p: torch.Tensor, draft: Draft, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = tuple(draft.tokens[i].tolist())
            parents = tuple(range(-1, len(tokens) - 1)) if draft.parents is None else tuple(draft.parents[i].tolist())
            distributions = None if draft.probs is None else list(draft.probs[i])
            case = Case(tokens, parents, distributions, 1.0, int(draft.lengths[i]))
            table = {case.path(node): p[0, node + 1] for node in range(-1, len(tokens))}
            breaks = BREAKS[name](World(p.shape[-1], draft.depth, table, {}), case)
            breaks += [set() for _ in range(len(tokens) + 1 - len(breaks))]
            cells = list(product(*(_cells(each) for each in breaks)))
            u = torch.tensor([[inside for inside, _ in cell] for cell in cells], dtype=torch.float64)
            index = torch.full((len(cells),), i)
            many = at_rows(draft, index)
            last, rest = rule(p.expand(len(cells), -1, -1), many, u)
            chances: dict[tuple, float] = {}
            outcomes = list(zip(last.tolist(), map(tuple, rest.tolist()), strict=True))
            for each, cell in zip(outcomes, cells, strict=True):
                chances[each] = chances.get(each, 0.0) + prod(part for _, part in cell)
            k = outcomes.index(list(chances)[pick(list(chances.values()))])
            return last[k], rest[k]

        return apply

    monkeypatch.setattr("speculator.decoding.engine.draw", draw)
    for module in ("shapes", "fixed_tree"):
        monkeypatch.setattr(f"speculator.drafters.{module}.draw", draw)

    def samples(noise: Noise, logits: torch.Tensor, draft: Draft, unpadded=None) -> torch.Tensor:
        if unpadded is not None:
            packed, logits = logits, logits.new_zeros(len(draft.tokens), draft.tokens.shape[1] + 1, logits.shape[-1])
            logits[unpadded] = packed
        if noise.sampling.greedy:
            return logits.argmax(-1)
        p = noise.sampling.probs(logits)
        tokens = torch.zeros(p.shape[:2], dtype=torch.long)
        for i in range(len(p)):
            at = 0
            while at >= 0:
                tokens[i, at] = pick(p[i, at].tolist())
                children = (draft.before[i] == at) & (draft.tokens[i] == tokens[i, at]) & draft.drafted[i]
                at = int(children.nonzero()[0, 0]) + 1 if children.any() else -1
        return tokens

    monkeypatch.setattr(Noise, "samples", samples)
    monkeypatch.setattr(Noise, "scores", lambda noise, logits, depth: logits)
    monkeypatch.setattr(
        "speculator.decoding.engine.REJECTION_RULES", {name: branched(name, rule) for name, rule in rules.items()}
    )


def four_token_pair() -> tuple[Target, MLPSpeculator]:
    """A target of four tokens and a head for it, in float64."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    more = {"num_attention_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **more, max_position_embeddings=32)).double().eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 20
    head = MLPSpeculator(MLPSpeculatorConfig(vocab_size=4, emb_dim=8, inner_dim=8, n_predict=2)).double()
    return Target(model, tokenizer=None), head
