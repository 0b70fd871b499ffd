"""Shapes of a draft: chain and best-first tree. Any source gives the logits."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from speculator.decoding.draft import Draft
from speculator.decoding.drafter import LogitsSource, Sequences, Shape
from speculator.decoding.request import as_count
from speculator.decoding.sampling import Noise, draw, most_likely
from speculator.decoding.verify import CHAIN_RULES
from speculator.errors import UserError

_MOST = 1024  # tokens of a draft: more never pay, and an absurd number would exhaust the memory
_MOST_OFFERED = 2**16
_BEAM = 10
"""The most tokens of a level of a `Tree` that are expanded."""


def check_length(length: Any) -> int:
    count = as_count("draft length", length, least=1)
    check_nodes(count)
    return count


def check_nodes(nodes: int, offered: int = 0) -> None:
    """Raise a UserError for a draft of more than `_MOST` nodes, or one chosen from more than `_MOST_OFFERED` tokens."""
    if nodes > _MOST:
        raise UserError(f"a draft of {nodes:,} tokens: at most {_MOST:,} can be verified in a step")
    if offered > _MOST_OFFERED:
        raise UserError(f"branches offer {offered:,} tokens to choose from: at most {_MOST_OFFERED:,}")


class Chain:
    """A chain of tokens without branches.

    Args:
        length: the most tokens.
        sampled: above temperature 0, sample each token from the source's distribution instead of taking the likeliest.
    """

    def __init__(self, length: int, sampled: bool = True):
        self.depth = self.levels = self.nodes = self.offered = check_length(length)
        self.width, self.sampled = 1, sampled
        self.rules: tuple[str, ...] = CHAIN_RULES

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        # Three ways to pick a token: drawn from q by a number of its own (`rejection`, `block`), the best score with
        # the target's own noise (`match` above temperature 0), or the likeliest. Draws of an `independent` source would
        # not fit together, because it does not read the tokens drawn before.
        drawn = self.sampled and not noise.coupled and not source.independent
        u = noise.uniforms(self.depth) if drawn else None
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        root = torch.zeros_like(pending)[:, None]  # a level of a chain has one token, so every parent has index 0
        for level in range(self.depth):
            new = source.next(level, tokens[-1][:, None], root) if level else source.first(pending, sequences)
            logits = new[:, 0]
            if u is not None:
                # The rule needs the very q that the token was drawn from, warpers included.
                probs.append(noise.sampling.probs(logits))
                tokens.append(draw(probs[-1], u[:, level]))
            elif self.sampled and noise.coupled:
                tokens.append(most_likely(noise.scores(logits[:, None], level)[:, 0]))
            else:
                tokens.append(most_likely(logits))
        lengths = torch.full_like(pending, self.depth)
        return Draft(torch.stack(tokens, 1), lengths, torch.stack(probs, 1) if probs else None)


def as_shape(shape: Shape | int) -> Shape:
    return Chain(shape) if isinstance(shape, int | Integral) else shape


def grown(
    tree: Draft,
    tokens: Tensor,  # [B, n]
    parents: Tensor,  # [B, n] index of each token's parent in the tree's last level
    width: int,  # tokens of that level; 1 for an empty tree, whose last level is the pending token
) -> Draft:
    """Return a tree with one more level. The result has no probabilities and no padding."""
    before = tree.tokens.shape[1]
    return Draft(
        tokens=torch.cat([tree.tokens, tokens], 1),
        lengths=torch.full_like(tree.lengths, before + tokens.shape[1]),
        probs=None,
        # `parents` count within the last level, which begins at `before - width` of the tree. With 5 tokens and a last
        # level of 2, parent 1 is token 4.
        parents=torch.cat([tree.before, parents + 1 + before - width], 1) - 1,
        depth=tree.depth + 1,
    )


class Tree:
    """A tree of the `nodes` likeliest tokens by joint probability (EAGLE-2, 2406.16858); its form changes every step.

    Args:
        branches: children that each expanded token offers, level by level; the first level is the pending token's.
            Of a level, the 10 likeliest tokens are expanded.
        nodes: number of tokens that are kept, and verified.

    Raises:
        UserError: the branches can't give so many tokens.
    """

    def __init__(self, branches: Sequence[int], nodes: int):
        self.branches = check_branches(branches)
        self.depth = self.levels = len(self.branches)
        self.width = max(self.branches)
        self.nodes = nodes
        self.rules: tuple[str, ...] = ("match",)
        self.offered, width = 0, 1
        for children in self.branches:
            self.offered, width = self.offered + width * children, min(_BEAM, width * children)
        check_nodes(nodes, self.offered)
        if not self.depth <= nodes <= self.offered:
            raise UserError(f"a tree of {nodes} nodes: its branches {self.branches} offer {self.depth}..{self.offered}")

    def draft(self, source: LogitsSource, pending: Tensor, noise: Noise, sequences: Sequences) -> Draft:
        tokens, parents, scores = _expand(source, pending, self.branches, noise, sequences)
        # Sorted, so that parents still come before their children.
        keep = scores.topk(self.nodes).indices.sort(-1).values  # [B, n], parents included
        nodes = torch.arange(self.nodes, device=keep.device).expand_as(keep)
        # From an offered token's index to its index among those that are kept. With keep = [0, 2, 5], token 5 becomes
        # node 2.
        node_of = torch.zeros_like(tokens).scatter(1, keep, nodes)
        kept = parents.gather(1, keep)
        # -1 is the pending token, which is no node; the clamp only keeps the index valid.
        kept = torch.where(kept < 0, -1, node_of.gather(1, kept.clamp_min(0)))
        lengths = torch.full_like(pending, self.nodes)
        return Draft(
            tokens=tokens.gather(1, keep), lengths=lengths, probs=None, parents=kept, depth=self.depth, width=self.width
        )


def _expand(
    source: LogitsSource, pending: Tensor, branches: Sequence[int], noise: Noise, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """Expand the `_BEAM` best tokens of each level; return the n = `Tree.offered` tokens that they offer as children.

    Returns, [B, n] each and level by level: the tokens, their parents' indices among the n (-1: the pending token), and
    scores. A score is the joint log-probability of the path, less 1e-4 per token; under `match` above temperature 0
    the probabilities are those of the logits plus noise. A child comes after its parent and never scores above it, so
    the best `nodes` form a tree.
    """
    count = len(pending)
    logits = source.first(pending, sequences)
    score = logits.new_zeros(count, 1, dtype=torch.float32)
    expanded = torch.full_like(pending, -1)[:, None]  # of the expanded tokens among all that are offered
    all_tokens, all_parents, all_scores = [], [], []
    offered = 0
    for level, children in enumerate(branches):
        # All tokens of a level have the same noise, that of their position, so scores compare across parents.
        best = noise.scores(logits, level).float().log_softmax(-1).topk(children)
        tokens = best.indices.flatten(1)
        scores = (score[:, :, None] + best.values).flatten(1) - 1e-4  # a sure child ties with its parent otherwise
        all_tokens.append(tokens)
        # Each expanded token offers `children` neighbours: the expanded 4 and 6 with 2 each give the parents 4 4 6 6.
        all_parents.append(expanded.repeat_interleave(children, 1))
        all_scores.append(scores)
        if level + 1 == len(branches):
            break
        top = scores.topk(min(_BEAM, scores.shape[1]))
        score, chosen = top.values, top.indices
        # Index within the level -> index among all that were offered: the levels before have `offered` tokens together.
        expanded = chosen + offered
        offered += scores.shape[1]
        # Siblings are neighbours in the flattened level, `children` per parent: token 7 of a level with 3 each belongs
        # to 2.
        logits = source.next(level + 1, tokens.gather(1, chosen), chosen // children)
    return torch.cat(all_tokens, 1), torch.cat(all_parents, 1), torch.cat(all_scores, 1)


def check_branches(branches: Sequence[int]) -> tuple[int, ...]:
    """Return the branches (see `Tree`); raise a UserError if there is no level, one without a child, or too many."""
    if not branches or min(branches) < 1:
        raise UserError(f"branches {tuple(branches)}: give at least one level, and at least one child on each")
    check_nodes(len(branches))
    return tuple(branches)
