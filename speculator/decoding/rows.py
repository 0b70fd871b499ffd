"""The rows of an engine: how they are given to requests, grow, move, are selected for a step, and captured.

A row is a slot of the scheduler, a row of the target's KV cache and of the drafter's memory, and an entry of `pending`.
What moves or grows does so in all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import add
from typing import Any

import torch
from torch import Tensor

from speculator.decoding.drafter import Drafter, Memory, Sequences, Shape
from speculator.decoding.prefill import Chunk
from speculator.decoding.request import Request, max_logprobs, suppressed
from speculator.decoding.sampling import RowSampling, Suppressed
from speculator.decoding.scheduler import DECODING, PREFILLING, Scheduler
from speculator.device import is_out_of_memory
from speculator.kernels import cuda_graphs
from speculator.kernels.cuda_graphs import Captured
from speculator.target.cache.kv_cache import KVCache, coarse_buckets
from speculator.target.model import Target

RESERVED_NEW_TOKENS = 1024
"""New tokens for which a row has room at admission; the cache grows if a request needs more."""
PASS = {"cuda": 8192}
"""Prompt tokens of a prefill pass while no row decodes, by device type. A short pass waits for the host, whose launches
take as long as the products of some 1,500 tokens of an 8B model."""
SCRATCH = 2**31
"""Bytes that a prefill pass may take for what grows with its tokens, see `Target.scratch_per_token`: a twelfth of a GPU
of 24 GB. A Llama of 8B reads 8,192 tokens in a pass up to position 13,000, and 860 at position 128,000."""
SMALLEST_PASS = 32
"""Tokens of a prefill pass that is not made smaller: it takes as little memory as a step of a few rows with drafts."""
_NO_MEMORY = Memory()


@dataclass
class Batch:
    """The R rows that one verification step decodes: the first rows of the cache.

    Attributes:
        requests: requests of the decoding rows, in order. In a captured step, idle rows may follow the decoding ones.
        pending: [R] newest token of each row: sampled, not yet read by the target.
        active: [R] False for idle rows.
        num_logprobs: number of likeliest tokens to report with their log-probabilities; None: report none.
        sequences: tokens of each row, the pending one last; empty for idle rows.
        suppressed: tokens that may not be sampled yet; None if no row has any.
    """

    requests: list[Request]
    pending: Tensor
    active: Tensor
    sampling: RowSampling
    num_logprobs: int | None
    sequences: Sequences = ()
    suppressed: Suppressed | None = None


class Rows:
    """The rows of an engine, in the target's KV cache and in the drafter's memory: assigned, moved, grown, selected.

    Args:
        capacity: tokens of a sequence for which every row has room from the start.
        capture: replay steps as CUDA graphs where target, drafter and device allow it.
        work: device work of a step, called with the arguments of `run`.

    Attributes:
        cache: the target's keys and values, from the first admission on.
        drafter: the drafter; from the first admission on, a copy whose memory has these rows.
        pending: [slots] newest token of each decoding row.
        capturing: whether steps are captured as CUDA graphs now.
    """

    cache: KVCache

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        slots: int,
        capacity: int,
        capture: bool,
        work: Callable[..., tuple[Tensor, Tensor | None]],
    ):
        self.target, self.drafter = target, drafter
        self.scheduler = Scheduler(slots, target.recurrent)
        self.pending = torch.zeros(slots, dtype=torch.long, device=target.device)
        self._active = torch.ones(slots, dtype=torch.bool, device=target.device)
        self._max_tokens = capacity
        """Tokens of a sequence for which every row has room."""
        self._capacity = 0
        """Positions that every row has in the cache and in the drafter's memory."""
        self._scratch = SCRATCH
        """Bytes for what grows with the tokens of a prefill pass; fewer once a pass has run out of memory."""
        self._batch: Batch | None = None
        self._capture = capture
        self.capturing = capture and cuda_graphs.capturable(target, drafter)
        self._samplings: dict[Hashable, RowSampling] = {}
        self._step = Captured(work, cuda_graphs.new_pool(target.device))

    @property
    def memory(self) -> Memory:
        """The drafter's memory of the rows; for plain decoding one that keeps nothing."""
        return self.drafter.memory if self.drafter else _NO_MEMORY

    # ---- slots

    def expect(self, request: Request) -> None:
        """Note how much room a request needs; the caches get it when they are next allocated or grown."""
        self._max_tokens = max(self._max_tokens, self._room(request))

    def admit(self, waiting: deque[Request]) -> None:
        """Free the slots of finished requests, and give free slots to waiting ones."""
        self.release()
        if waiting:
            if not hasattr(self, "cache"):
                self._allocate(self._open, waiting)
            self.scheduler.admit(waiting, self.memory.overlap)

    def replace_drafter(self, drafter: Drafter | None) -> None:
        """Draft with another drafter, or with none. Rows in use are prefilled again, for its memory."""
        if drafter and hasattr(self, "cache"):
            drafter = _opened(drafter, self.cache)
        self.scheduler.preempt()
        self.drafter, self._batch = drafter, None
        self.capturing = self._capture and cuda_graphs.capturable(self.target, drafter)
        self._new_graphs()

    def read_again(self) -> None:
        """Let the rows in use be prefilled again from their texts: the caches may hold more or less than those."""
        self.scheduler.preempt()
        self._batch = None
        self._new_graphs()  # which may have been captured half

    def release(self) -> None:
        """Free the slots of finished requests, and erase prompts that were cut off: nobody knows if they are finite."""
        for row in self.scheduler.release():
            self.erase(row)

    def erase(self, row: int) -> None:
        """Clear a row in the cache and in the drafter's memory: a number that is not finite reaches through a mask."""
        self.scheduler.slots[row].num_computed_tokens = self.pending[row] = 0
        self.cache.erase(row)
        self.memory.erase(row)

    def lack_memory(self, chunk: Chunk) -> None:
        """Halve the passes after one that ran out of memory, and prefill again; a prompt alone in a small one ends."""
        size = len(chunk.counts) * self.cache.padded_width(max(chunk.counts))
        if len(chunk.counts) > 1 or size > max(SMALLEST_PASS, self.cache.padded_width(1)):
            read = max(map(add, chunk.begins, chunk.counts))
            self._scratch = size * self.target.scratch_per_token(self.cache, read) // 2
        else:
            self._scratch = SCRATCH  # it was this prompt: others may fit in passes of any size
            request = self.scheduler.slots[chunk.start].request
            if request and not request.finish_reason:
                request.lack_memory()
            self.erase(chunk.start)
            self.release()
        self.read_again()  # the pass has changed the caches, and recurrent states can't go back

    def forget(self) -> None:
        """Empty all slots, so that no later prompt reuses an earlier one's prefix, and clear the drafter's history.

        No request may be in a slot.
        """
        self.scheduler = Scheduler(len(self.scheduler.slots), self.target.recurrent)
        if self.drafter:
            self.drafter.forget()

    # ---- room

    def grow(self, waiting: deque[Request]) -> None:
        """Grow the cache and the drafter's memory if the sequences in the slots, or the drafts, need more positions.

        If memory runs out, the largest request fails, whether it is in a slot or `waiting`.
        """
        longest = max((len(slot.sequence) for slot in self.scheduler.slots if slot.request), default=0)
        if longest > self._max_tokens:
            self._max_tokens = max(longest, min(longest + RESERVED_NEW_TOKENS, self.target.context_length))
        if longest:
            self._allocate(self._grow, waiting)

    def _open(self) -> None:
        """Allocate the target's cache, and replace the drafter by a copy with memory for its rows."""
        # The spare positions hold a draft that begins at the last token of the longest text.
        cache = self.target.cache(len(self.scheduler.slots), self._max_tokens + self._spare_positions)
        if self.drafter:
            self.drafter = _opened(self.drafter, cache)
        self.cache, self._capacity = cache, cache.capacity

    def _grow(self) -> None:
        """Grow the cache and the drafter's memory if `_max_tokens` and the spare positions don't fit."""
        needed = self._max_tokens + self._spare_positions
        if self.cache.room_for(needed) > self._capacity:
            self._new_graphs()  # first: there may be too little memory for the drafter's buffers, not for the cache's
            # By half of what there is, so that a text that grows is seldom copied; never beyond the longest text.
            most = self.target.context_length + self._spare_positions
            roomy = max(needed, min(self._capacity + self._capacity // 2, most))
            for capacity in (roomy, needed):
                try:
                    return self._grow_to(capacity)
                except (MemoryError, RuntimeError) as error:
                    if capacity == needed or not is_out_of_memory(error):
                        raise

    def _grow_to(self, capacity: int) -> None:
        self.cache.grow(capacity)
        capacity = self.cache.room_for(capacity)  # the cache may have more, of a growth that failed
        self.memory.grow(capacity)
        self._capacity = capacity

    def _room(self, request: Request) -> int:
        """Return how many tokens a request needs room for: all it has, and up to 1,024 new ones in the context."""
        new = min(request.max_new_tokens, RESERVED_NEW_TOKENS)
        return max(len(request.sequence), min(len(request.prompt) + new, self.target.context_length))

    def _allocate(self, allocate: Callable[[], None], waiting: deque[Request]) -> None:
        """Call `allocate` until it succeeds; after each failure the largest request fails, in a slot or `waiting`."""
        while True:
            try:
                return allocate()
            except (MemoryError, RuntimeError) as error:
                running = [slot.request for slot in self.scheduler.slots if slot.request]
                requests = [each for each in [*waiting, *running] if not each.finish_reason]
                if not is_out_of_memory(error):
                    raise
                # Tokens that there is room for already: `room_for` rounds up to a bucket, and some positions are spare.
                present = self._capacity - self.cache.bucket + 1 - self._spare_positions if self._capacity else 0
                needed = max([present, *map(self._room, requests)])
                if needed >= self._max_tokens and not requests:
                    raise
            if needed >= self._max_tokens:  # else a request has been cancelled since, and less will do
                *others, largest = sorted(requests, key=self._room)
                largest.lack_memory()
                self.release()
                needed = max([present, *map(self._room, others)])
            self._max_tokens = needed

    @property
    def _tokens_per_step(self) -> int:
        return 1 + (self.drafter.max_nodes if self.drafter else 0)

    @property
    def _spare_positions(self) -> int:
        """Cache positions for two steps: a captured step still writes a row whose request has ended."""
        return 2 * self._tokens_per_step

    # ---- moves

    def _sort(self) -> None:
        """Move decoding rows to the front, followed by rows in prefill, because a pass runs over neighbouring rows."""
        source, destination = self.scheduler.sort_by_phase()
        if destination:
            self._move(source, destination, max(len(self.scheduler.slots[row].sequence) for row in destination))
            self.pending[destination] = self.pending[source]

    def _move(self, source: list[int], destination: list[int], longest: int) -> None:
        self.cache.move(source, destination, longest)
        self.memory.move(source, destination, longest)

    # ---- what the next pass reads

    def next_chunk(self, width: int) -> Chunk | None:
        """Return the prompt tokens to process next, up to `width` of a row; None if all prompts are in the cache.

        While other rows decode, a chunk has at most max(width, tokens of the decoding rows in a step) tokens. Otherwise
        no row waits for the chunk, and on a GPU it may have more than `width` tokens of a row, see `PASS`. `_scratch`
        bounds its memory.
        """
        source, destination, longest = self.scheduler.share_prefixes()
        if destination:
            self._move(source, destination, longest)
        rows = self.scheduler.rows_in(PREFILLING)
        if not rows:
            return None
        if rows[-1] - rows[0] >= len(rows):
            self._sort()
            rows = self.scheduler.rows_in(PREFILLING)
        decoding = self.scheduler.count(DECODING)
        budget = max(width, decoding * self._tokens_per_step) if decoding else inf
        if not decoding:
            width = max(width, PASS.get(self.target.device.type, 0) // len(rows))
        slots = [self.scheduler.slots[row] for row in rows]
        # Attention reads as far as the row that is furthest, for all rows.
        read = max(min(len(slot.sequence), slot.num_computed_tokens + width) for slot in slots)
        most, padded = self._scratch // self.target.scratch_per_token(self.cache, read), self.cache.padded_width
        share = max(padded(1), most if decoding else most // len(rows))
        width = min(width, bisect_right(range(1, share + 1), share, key=padded))  # the widest that is not padded beyond

        def fits(widths: list[int]) -> bool:
            return sum(widths) <= budget and len(widths) * padded(max(widths)) <= most

        rows, widths = self.scheduler.next_chunk(rows, width, fits)
        slots = [self.scheduler.slots[row] for row in rows]
        begins = [slot.num_computed_tokens for slot in slots]
        # Drafters and attention pad rows to the widest chunk, which must fit the cache after the row with the most
        # tokens.
        room = self._capacity - max(begins)
        return Chunk(
            start=rows[0],
            sequences=[slot.sequence for slot in slots],
            begins=begins,
            counts=[min(room, own) for own in widths],
        )

    def decoding(self) -> list[Request]:
        """Move the rows that decode to the front, and return their requests in this order."""
        self.release()
        count = self.scheduler.count(DECODING)
        if any(slot.phase != DECODING for slot in self.scheduler.slots[:count]):
            self._sort()
        return [slot.request for slot in self.scheduler.slots[:count] if slot.request]

    def batch(self, requests: list[Request]) -> Batch:
        """Select the rows of the requests, those of `decoding`, for the next step, and return them as a batch."""
        count = len(requests)
        # Captured steps have a power of two rows, so that graphs are few; the rows from `count` on are idle.
        rows = min(len(self.scheduler.slots), 1 << (count - 1).bit_length()) if self.capturing else count
        # Less one: the newest token of each row is pending, and not in the cache yet.
        self.cache.select(0, rows, max(len(request.sequence) for request in requests) - 1)
        batch = self._batch
        # The same requests as in the step before: settings and views are still right, and nothing is sent to the
        # device.
        if batch is None or requests != batch.requests or rows != len(batch.pending):
            batch = self._batch = self._new_batch(requests, rows)
        batch.sequences = [*(request.sequence for request in requests), *[[] for _ in range(rows - count)]]
        early, batch.suppressed = suppressed(requests), None
        if early:
            self._suppressed.put(early)
            batch.suppressed = self._suppressed
        return batch

    @cached_property
    def _suppressed(self) -> Suppressed:
        return Suppressed(len(self.scheduler.slots), self.target.vocab_size, self.target.device)

    def _new_batch(self, requests: list[Request], rows: int) -> Batch:
        """Return a batch of the first `rows` rows: those of the requests, then idle ones."""
        samplings = [request.sampling for request in requests]
        sampling = RowSampling(samplings + samplings[:1] * (rows - len(requests)), self.target.device)
        # Views of the first rows. A captured step reads the same memory in every replay, so they are written in place.
        batch = Batch(
            requests,
            self.pending[:rows],
            self._active[:rows],
            sampling=sampling,
            num_logprobs=max_logprobs(requests),
        )
        batch.active.copy_(torch.arange(rows) < len(requests))
        if self.capturing:  # graphs read the settings from tensors that stay in place
            batch.sampling = self._samplings.setdefault((rows, *sampling.kind), sampling)
            batch.sampling.copy_(sampling)
        return batch

    def reshape(self, shape: Shape) -> None:
        """Draft in another shape from the next step on.

        Completions stay the same, except those of sampled rows under a rule other than `match`.
        """
        assert self.drafter is not None
        if shape is self.drafter.shape:
            return
        self.drafter.reshape(shape)
        capturing = self._capture and cuda_graphs.capturable(self.target, self.drafter)
        if capturing != self.capturing:
            self.capturing, self._batch = capturing, None  # select the rows again: other tensors hold the settings

    # ---- captured steps

    def run(self, engine: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Call `work` with these arguments or, while steps are captured, replay it as a CUDA graph, which reads none.

        Only buffers change between replays of one graph. So nothing here may keep the engine: it would never be freed.
        """
        if not self.capturing:
            return self._step.work(engine, batch)
        state = [*self.cache.state, self.pending, *self.memory.buffers]
        with cuda_graphs.on(self.target.device):
            # A fine bucket reads fewer keys and needs a graph of its own; until that pays, a coarse one will do.
            coarse = self.cache.spared and not self._step.pays(self._key(batch), self._saving)
            with coarse_buckets() if coarse else nullcontext():
                if coarse:
                    self.cache.round_again()
                return self._step(self._key(batch), state, engine, batch)

    def _key(self, batch: Batch) -> Hashable:
        """Return what shapes and code of a step depend on; whatever changes only values must be in a buffer."""
        drafting = self.drafter and (self.drafter.shape, self.memory.version)
        asked = batch.num_logprobs is not None, batch.suppressed is not None
        return len(batch.pending), self.cache.longest, batch.sampling.kind, drafting, asked

    def _saving(self) -> float:
        """Return the share of a step's time that fine buckets of the cache length save, compared with coarse ones.

        It is estimated as the bytes of keys and values that fine buckets don't read, over the bytes of the weights.
        """
        return self.cache.spared * self.cache.bytes_per_token / self._weight_bytes

    @cached_property
    def _weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.target.model.parameters())

    def _new_graphs(self) -> None:
        """Drop all CUDA graphs, which read old buffers; torch can't capture into a pool whose graphs are all gone."""
        self._step.clear(cuda_graphs.new_pool(self.target.device))


def _opened(drafter: Drafter, cache: KVCache) -> Drafter:
    """Return a copy of a drafter with an empty memory for the rows of a target's cache, and without history."""
    opened = copy(drafter)
    opened.memory = drafter.memory.open(cache)
    opened.forget()
    return opened
