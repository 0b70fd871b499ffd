"""Drafting with a trained head."""

from __future__ import annotations

from speculator.decoding.drafter import Drafter, Shape
from speculator.drafters.shapes import as_shape
from speculator.errors import UserError
from speculator.heads import Speculator


class HeadDrafter(Drafter):
    """Drafts with a head, in any shape.

    Args:
        shape: shape of the draft; a number is the length of a chain, None a chain of n_predict. Tuned settings are
            ignored: see `load_drafter`.

    Raises:
        UserError: the shape is deeper, or has more children of a token, than the head can draft.
    """

    name = "head"

    def __init__(self, head: Speculator, shape: Shape | int | None = None):
        self.head, self.trained_length = head.eval(), head.config.trained_length
        self.memory, self.aux_layers = head.drafting_source(), head.aux_layers
        self.reshape(as_shape(head.n_predict if shape is None else shape))

    def reshape(self, shape: Shape) -> None:
        config = self.head.config
        deepest = config.max_speculative_tokens
        if deepest is not None and shape.levels > deepest:
            raise UserError(f"num_speculative_tokens {shape.levels} is not in 1..{deepest}, what the head can draft")
        # With more children, some would be tokens that the head can't draft.
        if shape.width > config.candidates:
            raise UserError(f"{shape.width} children of a token: the head drafts from {config.candidates} tokens only")
        super().reshape(shape)
