"""Cross attention of encoder-decoder targets: keys and values of each row's source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from speculator.target.attention.write import Sources
from speculator.target.cache.kv_cache import Form, KVCache, aligned
from speculator.target.encoder.encoder import Encoder
from speculator.target.text import Source


class CrossMemory(Sources):
    """Cross-attention keys and values of B rows' sources, which are the inputs of an encoder.

    Args:
        layers: forms of each layer's keys and values, see `speculator.target.cache.kv_cache.forms`.
        rows: B, the number of rows.
        device: where keys and values are kept.

    Attributes:
        sources: the source of each row; () for a row that never had one.
        bias: [R, 1, 1, S] bias on the scores of the R selected rows, -inf for padding; None if there is no padding.
    """

    def __init__(self, encoder: Encoder, layers: Sequence[tuple[Form, ...]], rows: int, device: torch.device):
        self._encoder, self._device = encoder, device
        self._rows = KVCache(layers, rows, 1, device)
        # The model reads `keys` and `values` of these layers directly: views of the selected rows.
        self._shown: list[Any] = [DynamicLayer() for _ in layers]
        self._held: list[Any] = self._rows.layers
        self._selection: tuple[int, int, list[Source]] | None = None
        self.sources: list[Source] = [()] * rows
        self._dummy = encoder.dummy

    @property
    def bytes_per_token(self) -> float:
        return self._rows.bytes_per_token

    def arguments(self, name: str, own: KVCache) -> dict[str, object]:
        # With keys and values at hand, the model asks only whether there are states.
        return {name: EncoderDecoderCache(own, Cache(layers=self._shown)), "encoder_hidden_states": self._dummy}

    def holds(self, keys: Tensor) -> bool:
        return any(keys is layer.keys for layer in self._shown)

    def read(self, start: int, sources: Sequence[Source]) -> None:
        # A target refuses a source that its encoder can't read whole; a draft model's encoder may be a shorter one.
        most = self._encoder.longest
        cut = [source if len(source) <= most else source[:most] for source in sources]
        new = {row: source for row, source in enumerate(cut, start) if source != self.sources[row]}
        if not new:
            return
        self._rows.grow(max(map(len, new.values())))
        known = {source: row for row, source in enumerate(self.sources)}
        copied = {row: known[source] for row, source in new.items() if source in known}
        # All copies at once, and first: a row may be both read and overwritten.
        if copied:
            self._rows.move(list(copied.values()), list(copied), self._rows.capacity)
        # Sources of equal length are encoded together, without padding; a source of several rows is encoded once.
        encoded = sorted({source for source in new.values() if source not in known}, key=len)
        for length, group in groupby(encoded, len):
            together = list(group)
            pairs = [(row, together.index(source)) for row, source in new.items() if source in together]
            rows, index = ([each[k] for each in pairs] for k in (0, 1))
            layers = self._encoder.keys_and_values(self._encoder.encode(together))
            for own, made in zip(self._held, layers, strict=True):
                own.keys[rows, :, :length], own.values[rows, :, :length] = made.keys[index], made.values[index]
        for row, source in new.items():
            self.sources[row] = source
        self._selection = None

    def select(self, start: int, stop: int) -> None:
        if self._selection == (start, stop, sources := self.sources[start:stop]):
            return
        self._selection = start, stop, sources
        # A row without a source is idle. It sees one position, for kernels may return NaN for a token that sees none.
        lengths = torch.tensor([max(1, len(source)) for source in sources])
        longest = int(lengths.max())
        extent = min(aligned(longest, self._device), self._rows.capacity)
        for shown, layer in zip(self._shown, self._held, strict=True):
            shown.is_initialized = True  # else the model would compute them
            shown.keys, shown.values = layer.keys[start:stop, :, :extent], layer.values[start:stop, :, :extent]
        hidden = torch.arange(extent) >= lengths[:, None]
        bias = torch.zeros(hidden.shape, dtype=self._dummy.dtype).masked_fill_(hidden, -torch.inf)
        self.bias = bias[:, None, None].to(self._device) if hidden.any() else None

    def erase(self, row: int) -> None:
        self._rows.erase(row)
        self.sources[row], self._selection = (), None

    def move(self, source: Sequence[int], destination: Sequence[int]) -> None:
        self._rows.move(source, destination, self._rows.capacity)
        sources = [self.sources[row] for row in source]
        for row, moved in zip(destination, sources, strict=True):
            self.sources[row] = moved
        self._selection = None
