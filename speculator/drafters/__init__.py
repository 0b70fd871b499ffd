"""Drafters propose the tokens that the target verifies; each file holds one."""

from speculator.decoding.drafter import Drafter
from speculator.drafters.draft_model import DraftModelDrafter
from speculator.drafters.fixed_tree import Candidates, FixedTree
from speculator.drafters.head import HeadDrafter
from speculator.drafters.ngram import NgramDrafter
from speculator.drafters.shapes import Chain, Tree

__all__ = [
    "Candidates",
    "Chain",
    "DraftModelDrafter",
    "Drafter",
    "FixedTree",
    "HeadDrafter",
    "NgramDrafter",
    "Tree",
]
