"""Detect near-duplicate texts by MinHash over characters, in a table of fixed size."""

from __future__ import annotations

import re
import zlib

import numpy

MIN_SIMILARITY = 0.7
"""Jaccard similarity of their n-grams from which two texts are near-duplicates."""
_NGRAM = 5  # characters
_BANDS, _ROWS = 16, 4  # only texts that share a band are compared: 99% at similarity 0.7, 12% at 0.3
_BUCKETS = 1 << 18


class NearDuplicates:
    """The latest 262,144 texts, to detect near-duplicates of them by MinHash. New texts replace the oldest."""

    def __init__(self) -> None:
        random = numpy.random.default_rng(0)
        self._factors = random.integers(0, 1 << 63, (2, _BANDS * _ROWS), dtype=numpy.uint64) * 2 + 1
        self._signatures = numpy.zeros((_BUCKETS, _BANDS * _ROWS), dtype=numpy.uint32)
        self._last = numpy.full((_BANDS, _BUCKETS), -1, dtype=numpy.int32)
        self._count = 0

    def add(self, text: str) -> bool:
        """Return True if the text nearly duplicates an earlier one; otherwise add it."""
        signature = self._signature(text)  # [64] uint32
        # Texts of Jaccard similarity s agree in a band of r hashes with chance s^r, and in one of b bands with
        # 1 - (1 - s^r)^b. Only the last text of each bucket is compared with.
        bands = signature.reshape(_BANDS, _ROWS).astype("<u4")
        buckets = [zlib.crc32(band.tobytes()) % _BUCKETS for band in bands]
        places = {int(self._last[band, bucket]) for band, bucket in enumerate(buckets)} - {-1}
        if any((self._signatures[place] == signature).mean() >= MIN_SIMILARITY for place in places):
            return True
        # The oldest text's place is used again; its entries in the tables then lead to this text, which only costs a
        # comparison.
        place = self._count % _BUCKETS
        self._signatures[place] = signature
        self._last[range(_BANDS), buckets] = place
        self._count += 1
        return False

    def _signature(self, text: str) -> numpy.ndarray:
        """Return a text's MinHash signature, [64] uint32: minima over n-grams without case, spacing and punctuation."""
        # "Hello,  World!" and "hello world" are the same; a text without letters stays as it is.
        normal = " ".join(re.findall(r"\w+", text.casefold())) or text
        ngrams = {normal[i : i + _NGRAM] for i in range(max(1, len(normal) - _NGRAM + 1))}
        hashes = numpy.array(sorted(zlib.crc32(ngram.encode("utf-8", "replace")) for ngram in ngrams), numpy.uint64)
        # Hash function j is the upper half of a_j x + b_j modulo 2^64: [n-grams, 64], of which the minimum over
        # n-grams.
        return ((hashes[:, None] * self._factors[0] + self._factors[1]) >> numpy.uint64(32)).min(0).astype(numpy.uint32)
