"""Sequences that nearly say what another said: MinHash over the letters, in a table of fixed size."""

from __future__ import annotations

import re
import zlib

import numpy

ALIKE = 0.7
"""The Jaccard similarity of their pieces from which two texts count as the same."""
_PIECE = 5  # characters
_BANDS, _ROWS = 16, 4  # texts that share a band of their signatures are compared: at 0.7 99% are, at 0.3 12%
_BUCKETS = 1 << 18


class NearDuplicates:
    """Remembers texts; newer ones push out the oldest, so that memory stays below 100 MB."""

    def __init__(self) -> None:
        random = numpy.random.default_rng(0)
        self._factors = random.integers(0, 1 << 63, (2, _BANDS * _ROWS), dtype=numpy.uint64) * 2 + 1
        self._signatures = numpy.zeros((_BUCKETS, _BANDS * _ROWS), dtype=numpy.uint32)
        self._last = numpy.full((_BANDS, _BUCKETS), -1, dtype=numpy.int32)
        self._count = 0

    def add(self, text: str) -> bool:
        """Whether the text is much like one that was added before; if it is not, it is added."""
        signature = self._signature(text)
        bands = signature.reshape(_BANDS, _ROWS).astype("<u4")
        buckets = [zlib.crc32(band.tobytes()) % _BUCKETS for band in bands]
        places = {int(self._last[band, bucket]) for band, bucket in enumerate(buckets)} - {-1}
        if any((self._signatures[place] == signature).mean() >= ALIKE for place in places):
            return True
        place = self._count % _BUCKETS
        self._signatures[place] = signature
        self._last[range(_BANDS), buckets] = place
        self._count += 1
        return False

    def _signature(self, text: str) -> numpy.ndarray:
        """Of each of some hash functions the least value among the text's pieces, case and spacing aside."""
        normal = " ".join(re.findall(r"\w+", text.casefold())) or text
        pieces = {normal[i : i + _PIECE] for i in range(max(1, len(normal) - _PIECE + 1))}
        hashes = numpy.array(sorted(zlib.crc32(piece.encode("utf-8", "replace")) for piece in pieces), numpy.uint64)
        return ((hashes[:, None] * self._factors[0] + self._factors[1]) >> numpy.uint64(32)).min(0).astype(numpy.uint32)
