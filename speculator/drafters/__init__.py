"""Who proposes the tokens that the target verifies, one file each."""

from speculator.drafters.base import Drafter
from speculator.drafters.head import HeadDrafter
from speculator.drafters.ngram import NgramDrafter

__all__ = ["Drafter", "HeadDrafter", "NgramDrafter"]
