"""The best shape of a tree under a budget of nodes, from how often a child of each rank is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod

Path = tuple[int, ...]


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> list[Path]:
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

    def grow(path: Path, rank: int, budget: int) -> list[Path]:
        own = best(len(path), rank, budget)[1]
        if not own:
            return []
        child = (*path, rank)
        return [child, *grow(child, 0, own - 1), *grow(path, rank + 1, budget - own)]

    return sorted(grow((), 0, nodes), key=lambda path: (len(path), path))


def expected_tokens(acceptance: Sequence[Sequence[float]], paths: Iterable[Path]) -> float:
    """Tokens per step of a tree: 1 and the chances of all its nodes."""
    return 1 + sum(prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in paths)
