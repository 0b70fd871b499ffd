"""Multi-candidate drafts: trees whose shape was chosen beforehand, as `speculator eval tune` does from acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, product
from operator import mul

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, Sequences
from speculator.decoding.sampling import Noise, draw
from speculator.drafters.shapes import check_branches, check_nodes
from speculator.errors import UserError


class FixedTree:
    """A tree of any shape (Sequoia, 2402.12374): some tokens have more children than others.

    Args:
        paths: the nodes, each as the ranks on the way to it: (1, 0) is the first child of the root's second. Siblings
            are the best tokens by score (`Noise.scores`); under `multi_candidate` they are drawn one after the other,
            each from what its elders left.

    Raises:
        UserError: there is no node, one whose parent or elder sibling is missing, or too many.
    """

    def __init__(self, paths: Iterable[Sequence[int]]):
        nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        check_nodes(len(nodes))
        known = {(), *nodes}
        for path in nodes:
            # A node's parent is its path less the last rank, and its elder sibling has the rank before: (1, 2) needs
            # (1,) and (1, 1).
            rank = path[-1] if path else -1
            elder = (*path[:-1], rank - 1) if type(rank) is int and rank > 0 else ()
            if type(rank) is not int or rank < 0 or not {path[:-1], elder} <= known:
                raise UserError(f"tree: the node {list(path)} has no parent or no elder sibling in the tree")
        if not nodes:
            raise UserError("tree: no nodes")
        self.paths = tuple(nodes)
        self.depth = self.levels = len(nodes[-1])
        self.nodes = len(nodes)
        self.offered = self.nodes
        self.rules: tuple[str, ...] = ("match", "multi_candidate")
        self.width = 1 + max(path[-1] for path in nodes)
        self._parents = [nodes.index(path[:-1]) if len(path) > 1 else -1 for path in nodes]
        # For each level: each node's parent (index among the expanded tokens of the level before) and column (index
        # among all tokens that these offer), the nodes that are expanded themselves, and the parents of these.
        self._levels: list[tuple[list[int], ...]] = []
        self._most: list[int] = []
        self._on_device: dict[tuple[int, torch.device], tuple[Draft, list[list[Tensor]]]] = {}
        expanded: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth + 1):
            level = [path for path in nodes if len(path) == depth]
            parents = [expanded.index(path[:-1]) for path in level]
            has_children = [i for i, path in enumerate(level) if (*path, 0) in known]
            most = 1 + max(path[-1] for path in level)
            # Each expanded token offers its `most` best children, side by side: rank 1 below the third one is at 2 *
            # most + 1.
            columns = [parent * most + path[-1] for parent, path in zip(parents, level, strict=True)]
            self._levels.append((parents, columns, has_children, [parents[i] for i in has_children]))
            self._most.append(most)
            expanded = [level[i] for i in has_children]

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        rows = len(pending)
        form, levels = self._indices(pending)
        u = None if noise.coupled else noise.uniforms(self.nodes)
        # The root is the only expanded token at first, so f is 1 here.
        logits = source.first(pending, sequences)  # [B, f, V] of the expanded tokens
        all_tokens: list[Tensor] = []
        all_probs: list[Tensor] = []
        drafted = 0
        for depth, (most, level) in enumerate(zip(self._most, levels, strict=True), start=1):
            parents, columns, has_children, parents_of_these = level
            if u is None:
                offered = noise.scores(logits, depth - 1).topk(most).indices  # [B, f, most]
            else:
                probs = noise.sampling.probs(logits)
                # The numbers of this level's nodes, each in its column of the offered tokens; tokens that are not in
                # the tree get 0.
                own = u.new_zeros(rows, probs.shape[1] * most)
                own.index_copy_(1, columns, u[:, drafted : drafted + len(columns)])
                offered = siblings(probs.flatten(0, 1), own.view(-1, most)).view(rows, -1, most)
                all_probs.append(probs.index_select(1, parents))
            # Of the f * most offered tokens the tree keeps some; the others are never verified.
            tokens = offered.flatten(1).index_select(1, columns)
            all_tokens.append(tokens)
            drafted += len(columns)
            if depth == self.depth:
                break
            logits = source.next(depth, tokens.index_select(1, has_children), parents_of_these.expand(rows, -1))
        return form.filled(torch.cat(all_tokens, 1), torch.cat(all_probs, 1) if all_probs else None)

    def _indices(self, pending: Tensor) -> tuple[Draft, list[list[Tensor]]]:
        """Return a draft of this form with placeholder tokens, and `_levels` as tensors, on the device of `pending`."""
        key = (len(pending), pending.device)
        if key not in self._on_device:
            index = partial(torch.tensor, dtype=torch.long, device=pending.device)
            levels = [[index(each) for each in level] for level in self._levels]
            parents = index(self._parents).expand(len(pending), -1)
            full = torch.full_like(pending, self.nodes)
            form = Draft(tokens=parents, lengths=full, probs=None, parents=parents, depth=self.depth, width=self.width)
            _ = form.before, form.drafted, form.longest, form.paths  # worked out here, once
            self._on_device[key] = form, levels
        return self._on_device[key]


class Candidates(FixedTree):
    """Multi-candidate drafts (2401.06706): a token at depth i has `branches[i]` children, the pending one is at 0."""

    def __init__(self, branches: Sequence[int]):
        children = [range(count) for count in check_branches(branches)]
        check_nodes(sum(accumulate(branches, mul)))
        super().__init__(path for depth in range(len(children)) for path in product(*children[: depth + 1]))


def siblings(probs: Tensor, u: Tensor) -> Tensor:  # [R, V], [R, k] -> [R, k]
    """Draw k different tokens from each of R distributions, one after the other, by uniform numbers u in [0, 1)."""
    tokens: list[Tensor] = []
    for i in range(u.shape[1]):
        tokens.append(draw(probs, u[:, i]))
        # Without replacement; `draw` normalises what is left.
        probs = probs.scatter(1, tokens[-1][:, None], 0)
    return torch.stack(tokens, 1)
