"""`speculator eval tune`: see `eval.flags.tune`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch

from eval.recording import recorded_steps
from eval.suites import Suite, check_flags, check_rows, first_turns, sampling_of
from speculator import Candidates, HeadDrafter, NgramDrafter, Sampling, Target, generate, load_head
from speculator.checkpoints.hub import is_hub_id
from speculator.cli import model_flags
from speculator.decoding.drafter import Shape
from speculator.drafters.costs import CostTable
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.measure import measure_costs
from speculator.drafters.price import expected_tokens, fastest_shape
from speculator.drafters.tuning import PROMPT_HASHES, TUNED, Ranks, Tuning, choices_of, measured_on, shapes_to_measure
from speculator.errors import refuse
from speculator.files import check_output_file, write_json
from speculator.heads import Speculator
from speculator.tables import markdown_table
from speculator.terminal import Progress, working

_KINDS = {"greedy": 0.0, "sampled": 1.0}
_BRANCHES = (4, 2)  # children measured at each depth; deeper tokens have one
_TREE_SIZES = (3, 5, 8)
_ACCEPTANCE_STEPS = 16  # per prompt
_LOOKUP_SIZES = 8  # matches of this many tokens or more count together
ROWS = (1, 8, 32, 4, 2, 16)
"""Numbers of rows at which costs are measured, the most important first."""
_COST_SECONDS = 60.0  # for several rows; half of it for one row
LONGEST = 1.5 * _COST_SECONDS
"""Most seconds that the costs are measured."""


def run(arguments: argparse.Namespace) -> None:
    """Run `speculator eval tune`: measure, write decoding.json or `--output`, and print the predictions."""
    name = arguments.speculator
    refuse(
        (
            is_hub_id(name) and not arguments.output,
            f"{name} is no folder to write decoding.json to: copy a head from the hub first, by "
            f"`speculator export --speculator {name} --format native --output DIR`, or give --output",
        )
    )
    output = arguments.output = arguments.output or Path(arguments.speculator) / TUNED
    check_flags(arguments)
    check_rows(1, arguments.max_prompts)
    check_output_file("--output", output)
    target = model_flags.load_target(arguments)
    head = load_head(arguments.speculator, target, arguments.speculator_revision)
    # Not the prompts that `speculator eval` measures by default: a figure on what was tuned on is too good.
    suite = first_turns(arguments, arguments.suite, target, split="validation")
    rows = write_tuning(target, head, suite, output, arguments.max_new_tokens, sampling_of(arguments, 1.0))
    print(f"\n{table(rows)}\n\nWritten to {output}")


def write_tuning(
    target: Target, head: Speculator, suite: Suite, output: Path, max_new_tokens: int, sampled: Sampling
) -> list[dict]:
    """Measure a head on a suite, write the file `output` (decoding.json), and return the predictions for one row.

    It measures greedy decoding and, with the settings `sampled`, temperature 1.

    A prediction is a dict with "temperature", "draft" (in words), "tokens" per step, "cost" in plain steps, "speedup",
    and "best", whether it is the draft to use.
    """
    eos, prompts = target.eos_token_ids, suite.prompts
    settings = {kind: replace(sampled, temperature=temperature) for kind, temperature in _KINDS.items()}
    ranks: dict[str, Ranks] = {
        kind: rank_acceptance(target, head, prompts, sampling, eos=eos) for kind, sampling in settings.items()
    }
    texts = [*map(target.text, prompts)]
    lookup: dict[str, Sequence[float]] = {}
    for kind, sampling in Progress(settings.items(), title="tuning: n-gram lookup", unit="temperatures"):
        answers = generate(
            target, None, prompts, sampling, max_new_tokens=max_new_tokens, max_batch_size=8, eos_token_ids=eos
        ).check()
        lookup[kind] = lookup_acceptance(list(zip(texts, answers.tokens, strict=True)))
    # Of a head with few levels two sizes may give the same tree.
    trees = {
        kind: [*map(list, dict.fromkeys(tuple(best_tree(own, nodes)) for nodes in _TREE_SIZES))]
        for kind, own in ranks.items()
    }
    with working(f"tuning: the cost of steps, {LONGEST:.0f} s at most"):
        tuning, rows = _with_costs(target, head, Tuning(ranks, trees, lookup))
    content = {
        "schema": 5,
        "target": target.name,
        **measured_on(target),
        "suite": suite.name,
        "prompts": len(prompts),
        PROMPT_HASHES: suite.prompt_hashes,
        "acceptance": tuning.ranks,
        "trees": tuning.trees,
        "lookup": tuning.lookup,
        "costs": list(map(asdict, tuning.costs)),
    }
    write_json(output, content)
    return rows


def _with_costs(target: Target, head: Speculator, tuning: Tuning) -> tuple[Tuning, list[dict]]:
    """Measure the costs of steps, and choose the best draft: the smallest of those about as fast as the fastest.

    Returns the tuning with the costs, and `write_tuning`'s predictions. For greedy and for sampled decoding, the tuning
    keeps the best draft if that is a tree. Raises a UserError if no step was measured in time.
    """
    choices = choices_of(head, tuning)
    sizes = [(ROWS[0], kind == "greedy") for kind in _KINDS]
    alone = measure_costs(target, head, shapes_to_measure(head, choices), sizes, _COST_SECONDS / 2)
    slow = f"no step of {target.name} was measured in {_COST_SECONDS / 2:.0f} s, so its drafts can't be tuned"
    refuse((not alone, slow))
    cost, rows = CostTable(alone), []
    trees: dict[str, list] = {}
    for kind in _KINDS:
        greedy = kind == "greedy"
        fastest, before = fastest_shape(choices, cost, greedy, 1), None
        while fastest is not before:  # of the trees only this one is kept, and chosen among the chains later
            left = [each for each in choices if each.shape is fastest or not isinstance(each.shape, FixedTree)]
            fastest, before = fastest_shape(left, cost, greedy, 1), fastest
        best = next(choice for choice in choices if choice.shape is fastest)
        for choice in choices:
            if greedy not in choice.acceptance:
                continue
            tokens = expected_tokens(choice.acceptance[greedy])
            paid = cost(choice.shape, choice.shape.nodes, False, greedy, 1)
            figures = {"tokens": tokens, "cost": paid, "speedup": tokens / paid, "best": choice is best}
            rows.append({"temperature": _KINDS[kind], "draft": described(choice.shape), **figures})
        trees[kind] = [best.shape.paths] if isinstance(best.shape, FixedTree) else []
    kept = replace(tuning, trees=trees)
    sizes = [(count, kind == "greedy") for count in ROWS[1:] for kind in _KINDS]
    costs = alone + measure_costs(target, head, shapes_to_measure(head, choices_of(head, kept)), sizes, _COST_SECONDS)
    return replace(kept, costs=costs), rows


def described(shape: Shape) -> str:
    """Return the shape of a draft in words, such as "chain of 4"."""
    if isinstance(shape, FixedTree):
        return f"tree of {shape.nodes} tokens, {shape.depth} deep"
    return f"chain of {shape.depth}"


def table(rows: list[dict]) -> str:
    """Return the predictions of `write_tuning` as a Markdown table; each temperature's best draft is marked."""
    lines = []
    for row in rows:
        figures = (f"{row[name]:.2f}" for name in ("tokens", "cost", "speedup"))
        lines.append((f"{row['temperature']:g}", row["draft"], *figures, "best" * row["best"]))
    return markdown_table(["temperature", "draft", "acceptance length", "cost", "predicted speedup", ""], lines)


def lookup_acceptance(texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Return the acceptance rates of the first token that n-gram lookup drafts after matches of 1, 2, ... 8 tokens.

    The last one includes longer matches. A prior of 0.1 hits in 0.3 tries is added to each. `texts` are pairs of a
    prompt and the answer of plain decoding.
    """
    hits, tried = [0.1] * _LOOKUP_SIZES, [0.3] * _LOOKUP_SIZES  # a weak prior: mostly wrong
    for prompt, answer in texts:
        drafter, text = NgramDrafter(1), copy(prompt)
        for token in answer:
            # `size` is the length of the match that ends the text so far, `path` what followed it before.
            ((size, path),) = drafter.look([text])
            drafter.prepare()
            if size:
                at = min(size, _LOOKUP_SIZES) - 1
                hits[at] += path[0] == token
                tried[at] += 1
            text.append(token)
    return [hit / count for hit, count in zip(hits, tried, strict=True)]


def rank_acceptance(
    target: Target,
    head: Speculator,
    prompts: list[list[int]],
    sampling: Sampling,
    steps: int = _ACCEPTANCE_STEPS,
    eos: Collection[int] = (),
) -> list[list[float]]:
    """Return a[d][r], measured: how often the child of rank r is accepted, given that its parent at depth d was.

    Rank 0 is the head's first choice: at temperature 0 its likeliest token. Depth 0 is the root, the last token of the
    text, which counts as accepted. A wide tree is drafted for `steps` steps after each prompt; steps from a token of
    `eos` on are left out.
    """
    branches = tuple(min(n, head.config.candidates) for n in (*_BRANCHES, *[1] * head.n_predict)[: head.n_predict])
    hits = [torch.zeros(width) for width in branches]
    reached = [0] * len(branches)
    drafter = HeadDrafter(head, Candidates(branches))
    title = f"tuning: acceptance at temperature {sampling.temperature:g}"
    for number, prompt in enumerate(Progress(prompts, title=title, unit="prompts")):
        own = replace(sampling, seed=sampling.seed + number)
        for draft, result in recorded_steps(target, drafter, prompt, own, steps):
            path, tokens = result.tokens[0, 1:].tolist(), draft.tokens[0].tolist()
            accepted = int(result.accepted[0])
            if not {int(result.tokens[0, 0]), *path[:accepted]}.isdisjoint(eos):
                break
            start, size, place = 0, 1, 0  # of the level; number of parents; index of the accepted parent
            # The levels of the draft are laid end to end, families of `width` siblings within them. With the branches
            # 4, 2 the tokens 0..3 are the first level, and those below token 1 are 4 + 1 * 2 = 6 and 7.
            for depth, width in enumerate(branches[: accepted + 1]):
                reached[depth] += 1
                # The depth after the last accepted token is reached too: it counts as tried, and none of its ranks hit.
                if depth < accepted:
                    family = start + place * width
                    rank = tokens[family : family + width].index(path[depth])
                    hits[depth][rank] += 1
                    start, size, place = start + size * width, size * width, place * width + rank
    return [(hit / max(1, count)).tolist() for hit, count in zip(hits, reached, strict=True)]


Node = tuple[int, ...]


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> list[Node]:
    """Return the tree of at most `nodes` nodes with the most expected tokens (dynamic program of Sequoia, 2402.12374).

    A node is accepted with the product of the rates along its path, and the expected tokens are the sum of that over
    all nodes. Let g(d, r, n) be the most that n nodes can add among the children of rank r and above, and below them,
    of an accepted token at depth d:

        g(d, r, n) = max over m in 1..n of  a[d][r] (1 + g(d + 1, 0, m - 1)) + g(d, r + 1, n - m)

    Args:
        acceptance: a[d][r], see `rank_acceptance`.
        nodes: the most nodes of the tree.

    Returns:
        The nodes as paths of ranks: (1, 0) is the first child of the root's second child.
    """

    @cache
    def best(depth: int, rank: int, budget: int) -> tuple[float, int]:
        """Return g, and the number of nodes for the child of this rank and everything below it."""
        if budget == 0 or depth == len(acceptance) or rank == len(acceptance[depth]):
            return 0.0, 0
        options = [
            (acceptance[depth][rank] * (1 + best(depth + 1, 0, m - 1)[0]) + best(depth, rank + 1, budget - m)[0], m)
            for m in range(1, budget + 1)
        ]
        # Of equally good splits the one with fewer nodes in this child: the tree stays wide.
        return max(options, key=lambda option: (option[0], -option[1]))

    def grow(path: Node, rank: int, budget: int) -> list[Node]:
        own = best(len(path), rank, budget)[1]
        if not own:
            return []
        child = (*path, rank)
        return [child, *grow(child, 0, own - 1), *grow(path, rank + 1, budget - own)]

    return sorted(grow((), 0, nodes), key=lambda path: (len(path), path))
