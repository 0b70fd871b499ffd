"""Steps to decode in tests of CUDA graphs, and a double of a graph that a CPU can replay.

The double records the operations of a step and runs the record again. Like a CUDA graph, a replay runs no Python of the
step, reads changing numbers from tensors only, and writes every result to its place at the recording.
"""

from collections import Counter

import torch
from conftest import tiny_model
from drafters import SHAPES
from torch.utils import _pytree

from speculator import Engine, Sampling, Target
from speculator.kernels import cuda_graphs as graphs
from speculator.kernels.host_sync import HostSyncs
from speculator.target.cache import kv_cache as cache_module

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 4]]
SAMPLINGS = {
    "greedy": [Sampling()] * 4,
    "sampled": [
        Sampling(0.8, top_k=6, seed=1),
        Sampling(),
        Sampling(1.2, top_p=0.8, seed=9),
        Sampling(1.0, min_p=0.05, seed=3),
    ],
}
NAMES = [
    "none",
    *(f"head-{shape}" for shape in SHAPES),
    "model-chain",
    "model-tree",
    "pruned-tree",
    "attention-tree",
    "block-chain",
    "block-tree",
    "ngram",
    "attention-fixed-tree",
    "adaptive-attention",
]


def make_target(device: str = "cpu", dtype: torch.dtype = torch.float64) -> Target:
    """A target with sliding and full attention layers."""
    return Target(tiny_model("gemma3").to(device, dtype), tokenizer=None)


class Record(HostSyncs):
    """Records the operations that a function launches."""

    def __init__(self):
        super().__init__()
        self.operations: list[tuple] = []

    def note(self, func, args, kwargs, result):
        super().note(func, args, kwargs, result)
        self.operations.append((func, args, kwargs, result))

    @property
    def shapes(self) -> list[tuple]:
        """Every operation with the shapes and numbers that it was given."""
        return [
            (func, [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in _pytree.tree_leaves((a, k))])
            for func, a, k, _ in self.operations
        ]

    def run_again(self) -> None:
        for func, args, kwargs, result in self.operations:
            pairs = zip(_pytree.tree_leaves(result), _pytree.tree_leaves(func(*args, **kwargs)), strict=True)
            for old, new in pairs:
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


def overwrite(result, new) -> None:
    """Write a result into the tensors of an older one, as a replay does."""
    for old, each in zip(graphs.tensors(result), graphs.tensors(new), strict=True):
        old.copy_(each)


class Double:
    """A graph that runs a record again. The recording itself counts as the first replay."""

    made = 0

    def __init__(self, work, given):
        with Record() as self.record:
            self.result = work(*given)
        assert not self.record.names, "a captured step asks the device"
        self.replays = 0
        type(self).made += 1

    def replay(self):
        if self.replays:
            self.record.run_again()
        self.replays += 1

    def reset(self):
        del self.record, self.result


def capturing(monkeypatch, double: type[Double]) -> None:
    """Capture on the CPU, with a cache bucket that a short sequence outgrows."""

    def capture(work, pool, *given):
        graph = double(work, given)
        return graph, graph.result

    double.made = 0
    monkeypatch.setattr(graphs, "DEVICES", ("cpu",))
    monkeypatch.setattr(graphs, "enabled", True)
    monkeypatch.setattr(graphs.Captured, "failures", 0)
    monkeypatch.setattr(graphs, "warm_up", lambda work, *given: work(*given))
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setitem(cache_module.BUCKETS, "cpu", 16)
    monkeypatch.setattr(graphs, "_PRICE", 0.05)  # fine buckets pay after a few steps


def texts(
    target, drafter, sampling: str, rows: int, eos: tuple[int, ...] = (), max_new_tokens: int = 24
) -> list[list[int]]:
    engine = Engine(target, drafter, slots=rows)
    settings = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos}
    return engine.generate(PROMPTS[:rows], SAMPLINGS[sampling][:rows], **settings).tokens


def early_end(rows: list[list[int]]) -> tuple[int, ...]:
    """Return a token that ends some of the rows, but not all."""
    least = min(rows, key=lambda row: len(set(row)))
    others = Counter(token for row in rows for token in row[:-1] if token not in least)
    return (others.most_common()[-1][0],) if others else ()
