"""Assignment of requests to slots: admission, prefix sharing, chunked prefill. Host-side bookkeeping only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculator.decoding.request import Request
from speculator.target.text import source_of

DECODING, PREFILLING, WAITING_FOR_PREFIX, FREE = range(4)
"""Phases of a slot, in the order of the rows. WAITING_FOR_PREFIX: another slot is prefilling the prompt's prefix."""
_BLOCK = 8
"""Tokens per block: prompts with a common prefix are found by the hashes of their first block, first two blocks, ..."""


@dataclass(eq=False)
class Slot:
    """A row of the KV cache.

    Attributes:
        sequence: tokens that the row holds or held; of a request, its prompt and completion.
        num_computed_tokens: leading tokens of `sequence` whose keys and values are in the row.
        request: the request that has the slot; None for a free one.
        phase: DECODING, PREFILLING, WAITING_FOR_PREFIX or FREE.
        last_used: logical time of the last admission, prefill, copy or release.
        prefix_source: (slot, its sequence, n) from which the first n tokens are copied once computed; None: no copy.
        hashes: entries of the slot in the scheduler's table of prefixes.
    """

    sequence: Sequence[int] = ()
    num_computed_tokens: int = 0
    request: Request | None = None
    phase: int = FREE
    last_used: int = 0
    prefix_source: tuple[Slot, Sequence[int], int] | None = None
    hashes: Sequence[int] = ()


class Scheduler:
    """Assigns requests to slots; the i-th slot is row i of the KV cache.

    Args:
        recurrent: rows hold recurrent states, which can't be cut back: a prefix is copied or reused only when its
            source has computed exactly that many tokens. So a prefill chunk of the source stops at the prefix's end.
    """

    def __init__(self, num_slots: int, recurrent: bool = False):
        self.recurrent = recurrent
        self.slots = [Slot() for _ in range(num_slots)]
        self._time = 0
        self._prefixes: dict[int, Slot] = {}
        """Slot of a request whose prompt starts with the blocks of a hash."""

    def count(self, phase: int) -> int:
        return sum(slot.phase == phase for slot in self.slots)

    def rows_in(self, phase: int) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot.phase == phase]

    @property
    def prefilling(self) -> bool:
        return any(slot.phase in (PREFILLING, WAITING_FOR_PREFIX) for slot in self.slots)

    def release(self) -> list[int]:
        """Free slots of finished requests, whose tokens stay for shared prefixes; return rows with a prompt cut off."""
        cut_off = []
        for row, slot in enumerate(self.slots):
            if slot.request is not None and slot.request.finish_reason:
                if slot.phase == PREFILLING and slot.num_computed_tokens:
                    cut_off.append(row)
                kept = len(slot.request.sequence) - 1  # the newest token is still pending
                # The row may have read tokens that the sequence lacks: those after EOS in an accepted draft, or those
                # of a step that was cancelled. A recurrent state can't forget them, so nothing of it is reused.
                ahead = slot.num_computed_tokens > kept or slot.request.finish_reason == "cancelled"
                lost = slot.request.failure or (ahead and self.recurrent)
                slot.num_computed_tokens = 0 if lost else min(kept, slot.num_computed_tokens)
                slot.sequence, slot.request, slot.phase = slot.request.sequence, None, FREE
                for prefix in slot.hashes:
                    del self._prefixes[prefix]
                slot.prefix_source, slot.hashes = None, ()
                slot.last_used, self._time = self._time, self._time + 1
        return cut_off

    def preempt(self) -> None:
        """Mark all rows for prefill from the start, completions included; free slots keep nothing for later prompts."""
        for slot in self.slots:
            slot.num_computed_tokens = 0
            if slot.phase == DECODING:
                slot.phase = PREFILLING

    def admit(self, waiting: deque[Request], overlap: int) -> None:
        """Give waiting requests the free slots.

        A request gets the free slot that shares the longest prefix with it, if the prefix is nearly all of that slot or
        half of it while no slot is unused. Otherwise it gets an unused or the least recently used slot, into which a
        prefix of 8 tokens or more is copied. If a prompt in flight shares more, its prefix is copied instead; the
        request waits until that is computed, provided that the wait saves more than half of the rest of its prefill.

        Args:
            waiting: requests in the order submitted; admitted and cancelled ones are removed.
            overlap: tokens at the end of a reused prefix that are computed again. The last token of a prompt always is:
                its hidden state gives the first new token.
        """
        queued = [request for request in waiting if not request.finish_reason]
        if len(queued) < len(waiting):  # drop cancelled requests, also while no slot is free
            waiting.clear()
            waiting.extend(queued)
        free = [slot for slot in self.slots if slot.phase == FREE]
        unused = deque(slot for slot in free if not slot.num_computed_tokens)
        used = [slot for slot in free if slot.num_computed_tokens]
        while waiting and (unused or used):
            request = waiting.popleft()
            best, shared = None, 0
            for slot in used:
                # Tokens that a slot holds and has not computed are worth nothing: the minimum counts those that are in
                # the cache.
                length = min(shared_prefix(slot.sequence, request.prompt), slot.num_computed_tokens)
                # A recurrent state can't be cut back: of a slot with 100 tokens, a prompt can use all 100 or nothing.
                # At least one token of the prompt must be left to read, because its hidden state gives the first new
                # token.
                if self.recurrent and not length == slot.num_computed_tokens < len(request.prompt):
                    continue
                if length > shared:
                    best, shared = slot, length
                # No slot can share more: the prompt's last token is always computed.
                if shared >= len(request.prompt) - 1:
                    break
            # Two kinds of sources: a free slot's text, compared token by token above, and a prompt in flight, found by
            # its hashes.
            hashes = _block_hashes(request.prompt)
            prefix_source = self._find_prefix_source(request, shared, hashes, overlap)
            # Take the slot itself if little else is in it. Of 1,000 tokens with 995 shared, 5 are lost, fewer than a
            # block. With no unused slot, losing up to as many tokens as are shared is better than evicting another
            # slot.
            if best is not None and best.num_computed_tokens - shared <= (_BLOCK if unused else shared):
                slot = best
            else:  # do not overwrite the other tokens of the best slot
                # The least recently used goes first. A system prompt that others still copy is a recent one.
                slot = unused.popleft() if unused else min(used, key=lambda candidate: candidate.last_used)
                if best is not None and slot is not best:
                    if shared >= _BLOCK and prefix_source is None:
                        # Copied in the next `share_prefixes`. `last_used` keeps the source from being evicted before
                        # that.
                        reused = _reusable(shared, request.prompt, overlap)
                        prefix_source, best.last_used = (best, best.sequence, reused), self._time
                    shared = 0
            if slot in used:
                used.remove(slot)
            # With 64 shared tokens and an overlap of 1 (EAGLE reads x[t+1] at position t), 63 are reused: position 63
            # of the head was computed with the old text's next token.
            slot.num_computed_tokens = shared if self.recurrent else _reusable(shared, request.prompt, overlap)
            slot.request, slot.sequence, slot.last_used = request, request.sequence, self._time
            slot.prefix_source, slot.phase = prefix_source, WAITING_FOR_PREFIX if prefix_source else PREFILLING
            # The first request with a prefix keeps it.
            slot.hashes = [prefix for prefix in dict.fromkeys(hashes) if prefix not in self._prefixes]
            self._prefixes.update(dict.fromkeys(slot.hashes, slot))
        # Neighbours of like length attend together, so prompts that start at the same time are sorted: their rows are
        # empty, and nothing moves.
        empty = [row for row, slot in enumerate(self.slots) if slot.request and not slot.num_computed_tokens]
        ordered = sorted((self.slots[row] for row in empty), key=lambda slot: (slot.phase, -len(slot.sequence)))
        for row, slot in zip(empty, ordered, strict=True):
            self.slots[row] = slot

    def _find_prefix_source(
        self, request: Request, num_computed: int, hashes: list[int], overlap: int
    ) -> tuple[Slot, Sequence[int], int] | None:
        """Find the prompt in flight that shares the longest prefix with the request, if copying it saves enough.

        Copying saves enough if the prefix is computed already, or if waiting for it saves more than half of the tokens
        left to compute. A free slot offers `num_computed` tokens instead. `hashes` are of the prompt's prefixes of
        whole blocks, the shortest first. For `overlap` see `admit`.

        Returns:
            The prompt's slot, its sequence and the number of tokens to copy; None if no prompt shares enough.
        """
        # From the longest prefix to the shortest; the first that is good enough is the best.
        longest, seen = len(request.prompt) - 1, set()
        for prefix in reversed(hashes):
            slot = self._prefixes.get(prefix)
            if slot is None or slot.request is None or slot in seen:
                continue
            seen.add(slot)
            shared = min(shared_prefix(slot.request.prompt, request.prompt), longest)
            if self.recurrent and slot.num_computed_tokens > _reusable(shared, request.prompt, overlap):
                continue
            # Copy at once if it is computed. Else wait only if that saves more than half of what is left to read: of a
            # prompt of 101 tokens with nothing computed, at least 51 shared ones.
            ready = shared <= slot.num_computed_tokens
            if shared > num_computed and (ready or 2 * (shared - num_computed) > longest - num_computed):
                return slot, slot.sequence, _reusable(shared, request.prompt, overlap)
        return None

    def share_prefixes(self) -> tuple[list[int], list[int], int]:
        """Move slots that wait for a prefix to prefill, once the prefix is computed in its source or is lost.

        Returns:
            source rows and destination rows of the copies that the caller makes in the caches, and the tokens of the
            longest prefix.
        """
        source, destination, longest = [], [], 0
        rows = {slot: row for row, slot in enumerate(self.slots)}
        for row in self.rows_in(WAITING_FOR_PREFIX):
            slot = self.slots[row]
            assert slot.prefix_source is not None
            other, sequence, shared = slot.prefix_source
            # The source may have been given to another request meanwhile: then its tokens are gone, and this prompt is
            # read itself.
            present = other.sequence is sequence
            # All rows are copied at once: a row that is a destination now can't be a source yet.
            computed = other.num_computed_tokens >= shared and rows[other] not in destination
            if present and not computed and other.request:
                continue
            slot.phase, slot.prefix_source = PREFILLING, None
            if present and computed and not (self.recurrent and other.num_computed_tokens > shared):
                source.append(rows[other])
                destination.append(row)
                longest = max(longest, shared)
                slot.num_computed_tokens = shared
        return source, destination, longest

    def sort_by_phase(self) -> tuple[list[int], list[int]]:
        """Move decoding slots to the first rows, then those being prefilled, then free ones.

        A forward pass runs over neighbouring rows. Returns source and destination rows, which the caller moves in the
        caches; all other rows stay.
        """
        phases = sorted(slot.phase for slot in self.slots)
        # Only rows on the wrong side of a border move. With the phases [D, P, D, F] (D decodes, P is prefilled) rows 1
        # and 2 are swapped, and 0 and 3 stay.
        destination = [row for row, slot in enumerate(self.slots) if slot.phase != phases[row]]
        source = sorted(destination, key=lambda row: self.slots[row].phase)
        for row, slot in zip(destination, [self.slots[row] for row in source], strict=True):
            self.slots[row] = slot
        return source, destination

    def next_chunk(
        self, rows: list[int], max_width: int, fits: Callable[[list[int]], bool]
    ) -> tuple[list[int], list[int]]:
        """Choose which of neighbouring rows are prefilled next; return them and the number of tokens of each.

        Args:
            max_width: the most tokens of a row.
            fits: returns whether rows of these numbers of tokens fit a pass. If not all do, the row that has waited
                longest is taken, and as many of the rows after it as fit.
        """
        widths = [min(max_width, self._end(self.slots[row]) - self.slots[row].num_computed_tokens) for row in rows]
        start, stop = 0, len(rows)
        if not fits(widths):  # the row that has waited longest goes first, so none starves
            start = min(range(len(rows)), key=lambda i: self.slots[rows[i]].last_used)
            stop = start + 1
            while stop < len(rows) and fits(widths[start : stop + 1]):
                stop += 1
        for row in rows[start:stop]:
            self.slots[row].last_used = self._time
        self._time += 1
        return rows[start:stop], widths[start:stop]

    def _end(self, slot: Slot) -> int:
        """Return the position where a slot's next chunk ends at the latest: its sequence's end.

        With recurrent states it may be the end of a prefix that another slot copies.
        """
        if not self.recurrent:
            return len(slot.sequence)
        copied = [each.prefix_source for each in self.slots if each.prefix_source]
        ends = [shared for source, _, shared in copied if source is slot and shared > slot.num_computed_tokens]
        return min(ends, default=len(slot.sequence))


def _reusable(shared: int, prompt: Sequence[int], overlap: int) -> int:
    """Return how many tokens of a shared prefix need not be computed again; for `overlap`, see `Scheduler.admit`."""
    # A prompt of 10 tokens that is shared as a whole, with an overlap of 1: min(10, 9) - 1 = 8.
    return max(0, min(shared, len(prompt) - 1) - overlap)


def _block_hashes(prompt: Sequence[int]) -> list[int]:
    """Return hashes of the prompt's first block of tokens, first two blocks, ..., without an incomplete last block."""
    # Each hash contains the one before, so it stands for the whole prefix. `shared_prefix` compares the tokens later,
    # so a collision costs a comparison, nothing else. The source is part of all of them.
    hashes, last = [], hash(source_of(prompt))
    for end in range(_BLOCK, len(prompt) + 1, _BLOCK):
        last = hash((last, *prompt[end - _BLOCK : end]))
        hashes.append(last)
    return hashes


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens' keys and values can be copied; 0 if their sources differ."""
    return common_prefix(a, b) if source_of(a) == source_of(b) else 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    # Slices are compared in C. They double while they are equal, so that a short prefix costs little; then they halve.
    same, size, most = 0, 8, min(len(a), len(b))
    while same < most and a[same : same + size] == b[same : same + size]:
        same, size = min(same + size, most), 2 * size
    while same < most and size > 1:
        size //= 2
        if a[same : same + size] == b[same : same + size]:
            same = min(same + size, most)
    return same
