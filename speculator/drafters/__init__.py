"""Who proposes the tokens that the target verifies, one file each."""

from speculator.drafters.base import Drafter
from speculator.drafters.early_exit import EarlyExitDrafter
from speculator.drafters.fixed_tree import FixedTree
from speculator.drafters.head import HeadDrafter
from speculator.drafters.mixed import MixedDrafter
from speculator.drafters.model import ModelDrafter
from speculator.drafters.ngram import NgramDrafter
from speculator.drafters.topology import Candidates, Chain, Paths, Tree

__all__ = [
    "Candidates",
    "Chain",
    "Drafter",
    "EarlyExitDrafter",
    "FixedTree",
    "HeadDrafter",
    "MixedDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "Paths",
    "Tree",
]
