"""A tree whose shape was chosen beforehand, as `python -m eval tune` does from measured acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.sampling import RowSampling
from speculator.drafters.base import LawSource, Texts
from speculator.drafters.shapes import LOSSY, grown, siblings
from speculator.errors import UserError


class FixedTree:
    """Candidates in a shape of any kind (Sequoia, 2402.12374): some tokens have more children than others.

    Args:
        paths: the nodes, each as the ranks on the way to it: (1, 0) is the first child of the root's second. Above
            temperature 0 siblings are drawn one after the other, each from what its elders left; at temperature 0
            they are the likeliest tokens.

    Raises:
        UserError: no node, or one whose parent or elder sibling is missing.
    """

    capturable = True

    def __init__(self, paths: Iterable[Sequence[int]]):
        nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        known = {(), *nodes}
        for path in nodes:
            rank = path[-1] if path else -1
            if rank < 0 or path[:-1] not in known or (rank > 0 and (*path[:-1], rank - 1) not in known):
                raise UserError(f"tree: the node {list(path)} has no parent or no elder sibling in the tree")
        if not nodes:
            raise UserError("tree: no nodes")
        self.paths = tuple(nodes)
        self.depth, self.nodes = len(nodes[-1]), len(nodes)
        self.offered = self.nodes
        self.rules: tuple[str, ...] = ("multi-candidate", *LOSSY)
        self._width = 1 + max(path[-1] for path in nodes)
        # The nodes' parents, then of each level: its nodes' parents among the expanded tokens before it, their ranks,
        # who is expanded, and the parents of these.
        self._indices = [[nodes.index(path[:-1]) if len(path) > 1 else -1 for path in nodes]]
        self._most: list[int] = []
        self._placed: dict[torch.device, list[Tensor]] = {}
        expanded: list[tuple[int, ...]] = [()]
        for depth in range(1, self.depth + 1):
            level = [path for path in nodes if len(path) == depth]
            parents = [expanded.index(path[:-1]) for path in level]
            has_children = [i for i, path in enumerate(level) if (*path, 0) in known]
            ranks = [path[-1] for path in level]
            self._indices += [parents, ranks, has_children, [parents[i] for i in has_children]]
            self._most.append(1 + max(ranks))
            expanded = [level[i] for i in has_children]

    def draft(self, source: LawSource, pending: Tensor, sampling: RowSampling, u: Tensor, texts: Texts) -> Draft:
        rows, device = len(pending), pending.device
        if device not in self._placed:
            self._placed[device] = [torch.tensor(index, dtype=torch.long, device=device) for index in self._indices]
        all_parents, *levels = self._placed[device]
        logits = source.first(pending, texts)  # [B, f, V] of the expanded tokens
        fed = Draft.none(pending)  # the expanded tokens: a tree of their own
        all_tokens: list[Tensor] = []
        all_laws: list[Tensor] = []
        drafted = 0
        for depth, most in enumerate(self._most, start=1):
            parents, ranks, has_children, place = levels[4 * depth - 4 : 4 * depth]
            width = logits.shape[1]
            if sampling.greedy:
                offered = logits.topk(most).indices  # [B, f, most]
            else:
                laws = sampling.law(logits)
                own = u.new_zeros(rows, width, most)
                own[:, parents, ranks] = u[:, drafted : drafted + len(ranks)]
                offered = siblings(laws.flatten(0, 1), own.flatten(0, 1), False).view(rows, width, most)
                all_laws.append(laws[:, parents])
            tokens = offered[:, parents, ranks]
            all_tokens.append(tokens)
            drafted += len(ranks)
            if depth == self.depth:
                break
            newest, place = tokens[:, has_children], place.expand(rows, -1)
            fed = grown(fed, newest, place, width)
            logits = source.next(depth, newest, place, fed)
        return Draft(
            torch.cat(all_tokens, 1),
            torch.full_like(pending, self.nodes),
            torch.cat(all_laws, 1) if all_laws else None,
            all_parents.expand(rows, -1),
            depth=self.depth,
            width=self._width,
        )
