import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speculator.target.attention.attention import mask as mask_of
from speculator.target.attention.write import current
from speculator.target.cache.kv_cache import KVCache, bucketed, coarse_buckets

CPU = torch.device("cpu")
# Two heads of 3; one head of 5 in another dtype.
SMALL, LARGE = (2, 3, torch.float32, CPU), (1, 5, torch.float64, CPU)


def written(layers: list, lengths: list[int], width: int) -> KVCache:
    """Fill each position of row r with its own number plus 100 r, negative in the last write."""
    cache = KVCache(layers, rows=len(lengths), capacity=16, device=CPU)
    cache.lengths.copy_(torch.tensor(lengths))
    cache.select(0, len(lengths), max(lengths))
    slot = torch.arange(cache.capacity) + 100 * torch.arange(len(lengths))[:, None]
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            buffer.copy_(slot[:, None, :, None])
    with cache.writing(width):
        for layer in cache.layers:
            new = (-current().cache_positions - 100 * torch.arange(len(lengths))[:, None])[:, None, :, None]
            layer.update(*(new.expand(-1, x.shape[1], -1, x.shape[3]).to(x) for x in (layer.keys, layer.values)))
    return cache


@pytest.mark.parametrize("layers", [[(SMALL, SMALL)] * 3, [(SMALL, LARGE), (LARGE, LARGE), (SMALL, SMALL)]])
@pytest.mark.parametrize(("lengths", "paths"), [([4], [[0, 2, 3]]), ([4, 6], [[0, 1, 3], [0, 3, 0]])])
def test_a_path_moves_to_the_front_in_every_layer(layers, lengths, paths):
    cache = written(layers, lengths, width=4)
    cache.gather(torch.tensor(paths))
    cache.grow(40)
    for layer in cache.layers:
        for buffer in (layer.keys, layer.values):
            assert buffer.shape[2] >= 40
            for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
                expected = [100 * row + slot for slot in range(length)]
                expected += [-(100 * row + length + place) for place in path]
                assert (buffer[row, :, : length + 3] == torch.tensor(expected)[:, None]).all()
    forms = {form for layer in layers for form in layer}
    assert len(cache.stacks) == len(forms)
    assert sum(len(stack) for stack in cache.stacks.values()) == 2 * len(layers)


def test_every_token_sees_something_in_a_window():
    """A finished row may be longer than the extent; attention over no position may be NaN."""
    cache = KVCache(layers=[], rows=2, capacity=64, device=CPU)
    cache.lengths.copy_(torch.tensor([40, 3]))
    cache.select(0, 2, 3)
    with cache.writing(2):
        mask = mask_of(current(), groups=1, window=4, dtype=torch.float32) == 0
    assert mask.any(-1).all()
    assert mask[1, 0].tolist() == [[True, True, True, True, False], [False, True, True, True, True]]


def test_each_dtype_has_its_own_mask():
    """A bfloat16 model may have float32 layers. Masks are freed after the write, because a prefill's is large."""
    cache = written([(SMALL, SMALL)], [4, 2], width=2)
    with cache.writing(2):
        write = current()
        masks = {dtype: mask_of(write, groups=1, window=None, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
        assert all(mask.dtype == dtype for dtype, mask in masks.items())
        assert mask_of(write, groups=1, window=None, dtype=torch.bfloat16) is masks[torch.bfloat16]
    assert not write.masks


class _Largest(TorchDispatchMode):
    """Records the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func._schema.name in ("aten::index", "aten::clone"):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_rows_move_layer_by_layer():
    """The rows of all layers together may take gigabytes."""
    cache = written([(SMALL, SMALL)] * 3, [4, 6, 5], width=2)
    before = [layer.keys.clone() for layer in cache.layers]
    with _Largest() as largest:
        cache.move([1, 0], [0, 2], 6)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys[:, :, :6], keys[[1, 1, 0], :, :6])
    assert cache.lengths.tolist() == [6, 6, 4]
    assert largest.numbers == 2 * 2 * 6 * 3  # rows, heads, tokens, size


def test_lengths_are_bucketed_on_a_gpu_to_an_eighth_more_or_to_the_double():
    """Fused attention needs masks of 16 n positions."""
    device = torch.device("cuda")
    exact = {0: 0, 1: 256, 256: 256, 257: 288, 448: 448, 512: 512, 513: 576, 3000: 3072, 4200: 4608}
    assert {longest: bucketed(longest, device) for longest in exact} == exact
    for longest in range(257, 9000):
        assert longest <= bucketed(longest, device) < longest * 1.125
        assert bucketed(longest, device) % 16 == 0
    assert len({bucketed(longest, device) for longest in range(1, 8193)}) == 1 + 5 * 8
    with coarse_buckets():
        assert [bucketed(longest, device) for longest in (0, 1, 257, 513, 3000)] == [0, 256, 512, 1024, 4096]
    assert bucketed(257, CPU) == 257
