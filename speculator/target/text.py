"""A text: tokens that a decoder reads and writes, and the source that an encoder reads for it.

Only encoder-decoder targets have sources. A source belongs to its request, so texts carry it through the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from torch import Tensor

Source = tuple[int, ...]
"""Token ids that an encoder reads; () without an encoder."""
_numbers = count(1)


class Encoded(Source):
    """A source as encoder states [S, D], which `Encoder.encode` returns as they are; each has unique token ids."""

    states: Tensor

    @classmethod
    def of(cls, states: Tensor) -> Encoded:
        """Return a source with these states; its token ids are negative, so that n-gram lookup never finds them."""
        made = cls((-next(_numbers),) * len(states))
        made.states = states
        return made


class Text(list[int]):
    """Tokens that a decoder reads and writes, with their source."""

    def __init__(self, tokens: Sequence[int], source: Source = ()):
        super().__init__(tokens)
        self.source = source


def source_of(sequence: Sequence[int]) -> Source:
    """Return the source of a sequence; () if its target has no encoder."""
    return sequence.source if isinstance(sequence, Text) else ()
