"""What a head drafts fastest on this machine, at this batch size: how long a chain, or what tree.

How often a child of each rank is accepted is measured on real steps with a wide tree. Under every budget of nodes
dynamic programming gives the best tree, whose steps are then timed; the most promising trees and every chain are
decoded in turns. The one with the highest predicted speed E / (G c + v) wins, all of it measured: of a tree G c is one
draft. What else `generate` needs to choose before each step is measured too: how often lookups are right, and what
steps cost at other numbers of rows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import torch
from tqdm import tqdm

from data.sources import PYTHON_SOURCES
from eval.decoders import Decoder, batches, check_batches, decoder_of, measure_suite
from eval.metrics import row, shown
from eval.suites import Suite, add_flags, check_flags, check_lengths, check_rows, suite_of
from eval.timing import Engines
from speculator import Candidates, FixedTree, HeadDrafter, NgramDrafter, Sampling, Target, load_head
from speculator.cli import drafting
from speculator.decoding.drafter import Shape
from speculator.drafters.corpus import LONGEST
from speculator.drafters.costs import StepSeconds, isotonic, measure, measure_table, timed_steps
from speculator.drafters.shapes import Chain
from speculator.drafters.tuned import (
    LONGEST_CHAIN,
    SIZES,
    TUNED,
    contexts,
    described,
    entry_to_json,
    measured_on,
    shape_from_json,
    shape_to_json,
    shapes_to_measure,
)
from speculator.errors import OneLineParser, UserError
from speculator.files import check_output_file, write_json
from speculator.heads import Speculator
from speculator.tables import markdown_table

_BRANCHES = (6, 3, 2)  # children that are tried at each depth of the wide tree; one from there on
_BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24)
_RANK_STEPS = 16  # of each prompt
_TREE_COST_BLOCKS = 3
_TREES = 2  # how many go into the final round, beside the one that verifies as many tokens as the longest chain
_DEEPEST_CHAIN = 12  # of a head that drafts deeper than it was trained
_WHOLE = 0.05  # how often a chain as deep as that has to be accepted as a whole
_COST_SHARE = 0.2  # of the time that tuning takes, for measuring what steps cost at other numbers of rows


def build_parser() -> OneLineParser:
    """The flags of `tune`."""
    parser = OneLineParser(prog="python -m eval tune", description=__doc__)
    add_flags(parser, max_prompts=16)
    parser.add_argument("--speculator", required=True, help="folder of a trained head; decoding.json is written there")
    parser.add_argument("--suite", default=PYTHON_SOURCES, help="what to tune on; default: python-sources")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 1")
    parser.add_argument("--batch_size", type=int, action="append", help="rows in flight; default: 1; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="another file than decoding.json beside the head")
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Tune, print the table and write the choice."""
    output = arguments.output = arguments.output or Path(arguments.speculator) / TUNED
    check_flags(arguments)
    check_rows(max(arguments.batch_size or [1]), arguments.max_prompts)
    check_output_file("--output", output)
    target = drafting.load_target(arguments)
    head = load_head(arguments.speculator, target)
    suite = suite_of(arguments, arguments.suite, target)
    check_batches([suite], arguments.batch_size or [1])
    count = arguments.max_new_tokens
    check_lengths(target, max(map(len, suite.prompts)), count)
    if count < head.n_predict + 2:
        raise UserError(f"--max_new_tokens must be at least {head.n_predict + 2}: a whole step has to fit")
    rows = write_tuned(
        target,
        head,
        suite,
        output,
        temperatures=arguments.temperature or [0.0, 1.0],
        max_new_tokens=count,
        batch_sizes=arguments.batch_size or [1],
        seed=arguments.seed,
    )
    print(f"\n{table(rows)}\n\nWritten to {output}")


def write_tuned(
    target: Target,
    head: Speculator,
    suite: Suite,
    output: Path,
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    batch_sizes: Sequence[int] = (1,),
    seed: int = 0,
) -> list[dict]:
    """Tune at each temperature and batch size and write the choices; gives a row for all that was decoded."""
    rows, settings, texts, began = [], [], [], time.perf_counter()
    for batch_size, temperature in product(batch_sizes, temperatures):
        found, said = tune(target, head, suite, Sampling(temperature, seed=seed), max_new_tokens, batch_size)
        texts += said
        best = max(found, key=lambda each: each["predicted_speedup"])
        settings.append({"temperature": temperature, "batch_size": batch_size, **shape_to_json(shape_from_json(best))})
        rows += [{**each, "batch_size": batch_size, "chosen": each is best} for each in found]
    report = {
        "schema": 1,
        "settings": settings,
        "target": target.name,
        **measured_on(target, batch_sizes[0]),
        "suite": suite.name,
        "prompts": len(suite.prompts),
        "measured": rows,
        "lookup": lookup_acceptance(texts),
        "costs": step_costs(target, head, rows, _COST_SHARE * (time.perf_counter() - began)),
    }
    write_json(output, report)
    return rows


def tune(
    target: Target, head: Speculator, suite: Suite, sampling: Sampling, max_new_tokens: int, batch_size: int
) -> tuple[list[dict], list[tuple[list[int], list[int]]]]:
    """A row for every chain and the best trees, decoded in turns; and prompts with what plain decoding said."""
    eos = target.eos_token_ids if suite.chat else set()
    acceptance = rank_acceptance(target, head, suite.prompts, sampling, eos=eos)
    trees = _promising(target, head, acceptance, suite.prompts[:batch_size], sampling)
    shapes = [*chains(head, acceptance, max_new_tokens), *trees]
    drafters = {str(number): HeadDrafter(head, shape) for number, shape in enumerate(shapes)}
    engines: Engines = {}
    decoders = [decoder_of(target, key, each, engines) for key, each in ({"none": None} | drafters).items()]
    measured = measure_suite(target, decoders, suite, sampling, max_new_tokens, batch_size)
    found = []
    for decoder in decoders[1:]:
        figures = _figures(target, decoder, suite, sampling, measured, max_new_tokens, batch_size)
        shape = shapes[int(decoder.key)]
        tree = shape_to_json(shape).get("tree")
        found.append({**figures, "shape": described(shape), "nodes": shape.nodes, "tree": tree})
    plain = measured.timed["none"].batches[::-1]
    first = dict(zip(measured.conversations[::-1], plain, strict=True))  # the first turns alone
    whose = batches(suite, batch_size)
    pairs = (zip(whose[number], batch.tokens, strict=True) for number, batch in first.items())
    return found, [(suite.prompts[i], tokens) for batch in pairs for i, tokens in batch]


def chains(head: Speculator, acceptance: Sequence[Sequence[float]], max_new_tokens: int) -> list[Chain]:
    """Chains to try: as deep as the head was trained. One that drafts deeper does so while a chain is likely enough to
    be accepted as a whole, each token behind those of `acceptance` as often as the last of these."""
    longest = min(head.n_predict, LONGEST_CHAIN)
    if head.config.max_speculative_tokens is None:
        chance, last = prod(level[0] for level in acceptance[:longest]), acceptance[longest - 1][0]
        while longest < min(_DEEPEST_CHAIN, max_new_tokens - 2) and chance * last >= _WHOLE:
            longest, chance = longest + 1, chance * last
    return [Chain(length) for length in range(1, longest + 1)]


def lookup_acceptance(texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """How often the next token is the one that a lookup in the text so far copies, after matches of 1, 2, ... tokens.

    Of prompts with what the target said; a lookup is as often right when the text is drafted for. It never falls with
    the match: neighbours that do are taken together.
    """
    counts = [[0.1, 0.3] for _ in range(LONGEST)]  # as if very little had been seen, mostly wrong
    for prompt, said in texts:
        drafter, text = NgramDrafter(1), list(prompt)
        for token in said:
            ((size, copied),) = drafter.look([text])
            if size:
                counts[size - 1][0] += copied[0] == token
                counts[size - 1][1] += 1
            text.append(token)
    return [chance for _, chance in isotonic((size, hits / tried, tried) for size, (hits, tried) in enumerate(counts))]


def step_costs(target: Target, head: Speculator, rows: list[dict], seconds: float) -> list[dict]:
    """What steps of a head cost with some of the shapes that were decoded, by rows and length of the texts."""
    # What a draft costs on a long text is the second most telling: one row's cache is soon filled.
    places = sorted(product(contexts(target), SIZES), key=lambda place: place[1] != 1)
    entries = []
    kinds = sorted({Sampling(each["temperature"]).greedy for each in rows})
    for greedy in kinds:
        own = [
            shape_from_json(each) for each in rows if each["tree"] and Sampling(each["temperature"]).greedy == greedy
        ]
        sizes = [(size, context, greedy) for context, size in places]
        for entry in measure_table(target, head, shapes_to_measure(head, own), sizes, seconds / len(kinds)):
            decoded = _decoded(rows, entry.rows, greedy) if entry.context == contexts(target)[0] else []
            entries.append(entry.known_better(decoded) if decoded else entry)
    return [entry_to_json(entry) for entry in entries]


def _decoded(rows: list[dict], batch_size: int, greedy: bool) -> list[tuple[Shape, float, float]]:
    """What drafts and verify passes of these rows' shapes cost where they were decoded."""
    return [
        (
            shape_from_json(each),
            each["cost"]["draft"] * each["num_speculative_tokens"],
            each["cost"]["verify"],
        )
        for each in rows
        if each["batch_size"] == batch_size and Sampling(each["temperature"]).greedy == greedy
    ]


def _figures(target, decoder: Decoder, suite, sampling, measured, max_new_tokens, batch_size) -> dict:
    names = (
        *("temperature", "num_speculative_tokens", "rule", "acceptance_length", "acceptance_by_position", "cost"),
        *("predicted_speedup", "speedup"),
    )
    whole = row(target, decoder, suite, sampling, measured, max_new_tokens, batch_size, None)
    figures = {name: whole[name] for name in names}
    figures["tokens_per_second"] = whole["tokens_per_second"]["speculative"]
    return figures


def rank_acceptance(
    target: Target,
    head: Speculator,
    prompts: list[list[int]],
    sampling: Sampling,
    steps: int = _RANK_STEPS,
    eos: Collection[int] = (),
) -> list[list[float]]:
    """a[d][r]: how often the child of rank r is the accepted one, of a token at depth d that was accepted itself.

    Steps from a token of `eos` on are left out.
    """
    branches = tuple(min(n, head.config.output_size) for n in (*_BRANCHES, *[1] * head.n_predict)[: head.n_predict])
    hits = [torch.zeros(width) for width in branches]
    reached = [0] * len(branches)
    drafter = HeadDrafter(head, Candidates(branches))
    for prompt in tqdm(prompts, desc=f"ranks, temperature {sampling.temperature:g}", unit="prompt"):
        for draft, result in timed_steps(target, drafter, [prompt], sampling, steps, StepSeconds()):
            path, tokens = result.tokens[0, 1:].tolist(), draft.tokens[0].tolist()
            accepted = int(result.accepted[0])
            if not {int(result.tokens[0, 0]), *path[:accepted]}.isdisjoint(eos):
                break
            start, size, place = 0, 1, 0  # of a level, the count of their parents, and which of those was accepted
            for depth, width in enumerate(branches[: accepted + 1]):
                reached[depth] += 1
                if depth < accepted:
                    family = start + place * width
                    rank = tokens[family : family + width].index(path[depth])
                    hits[depth][rank] += 1
                    start, size, place = start + size * width, size * width, place * width + rank
    return [(hit / max(1, count)).tolist() for hit, count in zip(hits, reached, strict=True)]


def _promising(
    target: Target,
    head: Speculator,
    acceptance: Sequence[Sequence[float]],
    prompts: list[list[int]],
    sampling: Sampling,
) -> list[FixedTree]:
    """The trees with the highest predicted speeds, and the one that is as many nodes as the longest chain."""
    depths, budgets = range(1, head.n_predict + 1), sorted({*_BUDGETS, head.n_predict})
    shapes = {tuple(best_tree(acceptance[:depth], nodes)) for depth in depths for nodes in budgets}
    speeds: dict[tuple, float] = {}
    for paths in tqdm(sorted(shapes), desc=f"trees, temperature {sampling.temperature:g}", unit="tree"):
        costs, drafter = StepSeconds(), HeadDrafter(head, FixedTree(paths))
        measure(target, drafter, prompts, sampling, _TREE_COST_BLOCKS, costs)
        speeds[paths] = expected_tokens(acceptance, paths) / sum(costs.ratios())
    speeds = target.broadcast_object(speeds)  # by the clock
    chosen = sorted(speeds, key=lambda paths: -speeds[paths])[:_TREES]
    alike = tuple(best_tree(acceptance, head.n_predict))
    return [FixedTree(paths) for paths in dict.fromkeys([*chosen, alike])]


def table(rows: list[dict]) -> str:
    """What was measured, a line each; the chosen ones are marked."""
    header = ["rows", "temperature", "draft", "rule", "tokens verified", "tokens per step", "predicted speedup"]
    lines = [
        (
            each["batch_size"],
            f"{each['temperature']:g}",
            each["shape"],
            each["rule"],
            each["nodes"] + 1,
            f"{each['acceptance_length']:.2f}",
            f"{each['predicted_speedup']:.2f}",
            shown(each["speedup"]["plain"]),
            f"{each['tokens_per_second']:.0f}",
            "chosen" if each["chosen"] else "",
        )
        for each in rows
    ]
    return markdown_table([*header, "measured", "tokens/s", ""], lines)


Node = tuple[int, ...]


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> list[Node]:
    """The tree of `nodes` nodes that keeps the most tokens, by dynamic programming (Sequoia, 2402.12374, section 3).

    A node is accepted with the product of the acceptances along its path, and the tokens that a step keeps are in the
    mean the sum of that over all nodes. With g(d, r, n) the most that n nodes can add among the children from rank r
    on, and below them, of an accepted token at depth d:

        g(d, r, n) = max over m in 1..n of  a[d][r] (1 + g(d + 1, 0, m - 1)) + g(d, r + 1, n - m)

    Args:
        acceptance: a[d][r], how often the child of rank r of an accepted token at depth d is the accepted one.
        nodes: the budget; no more than the ranks and depths of `acceptance` have room for are used.

    Gives:
        the nodes as paths of ranks: (1, 0) is the first child of the root's second.
    """

    @cache
    def best(depth: int, rank: int, budget: int) -> tuple[float, int]:
        """What can be added, and how many nodes the child of this rank and what is below it get."""
        if budget == 0 or depth == len(acceptance) or rank == len(acceptance[depth]):
            return 0.0, 0
        options = [
            (acceptance[depth][rank] * (1 + best(depth + 1, 0, m - 1)[0]) + best(depth, rank + 1, budget - m)[0], m)
            for m in range(1, budget + 1)
        ]
        return max(options, key=lambda option: (option[0], -option[1]))

    def grow(path: Node, rank: int, budget: int) -> list[Node]:
        own = best(len(path), rank, budget)[1]
        if not own:
            return []
        child = (*path, rank)
        return [child, *grow(child, 0, own - 1), *grow(path, rank + 1, budget - own)]

    return sorted(grow((), 0, nodes), key=lambda path: (len(path), path))


def expected_tokens(acceptance: Sequence[Sequence[float]], paths: Iterable[Node]) -> float:
    """Tokens per step of a tree: 1 and the chances of all its nodes."""
    return 1 + sum(prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)
