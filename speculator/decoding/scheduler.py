"""Which request is in which row of the cache: what joins, what leaves, who is prefilled next. The host's part alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from speculator.decoding.request import Request

DECODING, JOINING, FOLLOWING, FREE = range(4)
"""Decoding; being prefilled; waiting for the beginning of a prompt that another row is reading; free."""
_BLOCK = 8
"""Tokens. Prompts that begin alike are found by the hashes of their beginnings of one, two, ... blocks."""
_FEW = 1024


class Slot:
    """A row of the cache: the text that it holds or held, and how many of its tokens have their keys there."""

    def __init__(self) -> None:
        self.text: Sequence[int] = ()
        self.known = 0
        self.request: Request | None = None
        self.phase = FREE
        self.turn = 0
        """When it was last prefilled, copied from or left: the first in line, and the first to go, has the least."""
        self.following: tuple[Slot, Sequence[int], int] | None = None
        """(slot, its text, n): this one waits until that slot has the first n tokens of the text, and copies their keys
        and values."""


class Slots:
    """The slots in the order of their rows.

    Args:
        count: of slots.
    """

    def __init__(self, count: int):
        self.rows = [Slot() for _ in range(count)]
        self._turn = 0
        self._beginnings: dict[int, tuple[Slot, Request]] = {}
        """By hash: a slot and the request whose prompt begins so; void when that is in the slot no longer."""
        self._most_beginnings = _FEW

    def count(self, phase: int) -> int:
        return sum(slot.phase == phase for slot in self.rows)

    def of(self, phase: int) -> list[int]:
        """The rows in a phase."""
        return [row for row, slot in enumerate(self.rows) if slot.phase == phase]

    @property
    def joining(self) -> bool:
        """Whether some prompt is not read yet."""
        return any(slot.phase in (JOINING, FOLLOWING) for slot in self.rows)

    def release(self) -> None:
        """Free the slots whose requests have ended; what they hold stays for a prompt that begins alike."""
        for slot in self.rows:
            if slot.request is not None and slot.request.finish_reason:
                if slot.phase == DECODING:
                    slot.known = len(slot.request.text) - 1  # all but the newest token
                slot.text, slot.request, slot.phase = slot.request.text, None, FREE
                slot.turn, self._turn = self._turn, self._turn + 1

    def admit(self, waiting: deque[Request], overlap: int) -> None:
        """Give waiting requests the free slots: to each the one with the longest common prefix, if that is all but a
        few tokens of what the slot holds, or half of it and no slot is unused; else an unused one, or the one whose
        last use is the longest ago, which copies the prefix.

        Of a prefix the last `overlap` tokens are processed again, and of a prompt at least the last token: its state
        gives the first new one. Where a prompt that has been read, or is being read, shares more, the request follows:
        its row gets that from the other's. It waits for no less than half of what it would have to process.
        """
        free = [slot for slot in self.rows if slot.phase == FREE]
        fresh = deque(slot for slot in free if not slot.known)
        used = [slot for slot in free if slot.known]
        while waiting and (fresh or used):
            request = waiting.popleft()
            if request.finish_reason:  # cancelled
                continue
            best, known = None, 0
            for slot in used:
                shared = min(common_prefix(slot.text, request.prompt), slot.known)
                if shared > known:
                    best, known = slot, shared
                if known >= len(request.prompt) - 1:
                    break
            blocks = _hashes(request.prompt)
            following = self._following(request, known, blocks)
            if best is not None and best.known - known <= (_BLOCK if fresh else known):
                slot = best
            else:  # another text would be lost
                slot = fresh.popleft() if fresh else min(used, key=lambda each: each.turn)
                if best is not None and slot is not best:
                    if known >= _BLOCK and following is None:
                        following, best.turn = (best, best.text, known), self._turn
                    known = 0
            if slot in used:
                used.remove(slot)
            slot.known = _reused(known, request.prompt, overlap)
            slot.request, slot.text, slot.turn, slot.following = request, request.text, self._turn, following
            slot.phase = FOLLOWING if following else JOINING
            self._note(slot, request, blocks)

    def _following(self, request: Request, known: int, blocks: list[int]) -> tuple[Slot, Sequence[int], int] | None:
        """Whose prompt has the most of this one, if that is enough more than `known`."""
        most, seen = len(request.prompt) - 1, set()
        for block in reversed(blocks):
            slot, other = self._beginnings.get(block, (None, None))
            if slot is None or other is None or slot.request is not other or slot in seen:
                continue
            seen.add(slot)
            shared = min(common_prefix(other.prompt, request.prompt), most)
            if shared > known and (shared <= slot.known or 2 * (shared - known) > most - known):
                return slot, slot.text, shared
        return None

    def _note(self, slot: Slot, request: Request, blocks: list[int]) -> None:
        """That a slot's prompt begins so; who came first stays."""
        for block in blocks:
            other = self._beginnings.get(block)
            if other is None or other[0].request is not other[1]:
                self._beginnings[block] = slot, request
        if len(self._beginnings) > self._most_beginnings:
            valid = {block: each for block, each in self._beginnings.items() if each[0].request is each[1]}
            self._beginnings, self._most_beginnings = valid, max(_FEW, 2 * len(valid))

    def follow(self, overlap: int) -> tuple[list[int], list[int], int]:
        """Let those be prefilled whose leader has read what they share, or is gone.

        Returns rows, whose first tokens are to be copied, where each of them goes, and the most tokens of one.
        """
        source, to, longest = [], [], 0
        places = {slot: row for row, slot in enumerate(self.rows)}
        for row in self.of(FOLLOWING):
            slot = self.rows[row]
            assert slot.following is not None
            leader, text, shared = slot.following
            there, place = leader.text is text, places[leader]
            read = leader.known >= shared and place not in to  # what it is given now is there after all have moved
            if there and not read and leader.request:
                continue
            slot.phase, slot.following = JOINING, None
            if there and read:
                source.append(place)
                to.append(row)
                longest = max(longest, shared)
                slot.known = _reused(shared, slot.text, overlap)
        return source, to, longest

    def arrange(self) -> tuple[list[int], list[int]]:
        """Decoding rows first, then those being prefilled, then free ones: a pass runs over neighbours.

        Returns rows and where each of them goes; the others stay.
        """
        wanted = sorted(slot.phase for slot in self.rows)
        to = [row for row, (slot, phase) in enumerate(zip(self.rows, wanted, strict=True)) if slot.phase != phase]
        source = sorted(to, key=lambda row: self.rows[row].phase)
        for row, slot in zip(to, [self.rows[row] for row in source], strict=True):
            self.rows[row] = slot
        return source, to

    def next_chunk(self, rows: list[int], widest: int, budget: int | None) -> tuple[list[int], int]:
        """Which of neighbouring rows are prefilled next, and how many tokens of each at most.

        With a `budget` of tokens in all: who has waited longest, and as many of its neighbours as that leaves room for.
        """
        widths = [min(widest, len(self.rows[row].text) - self.rows[row].known) for row in rows]
        start, stop = 0, len(rows)
        if budget is not None:
            start = min(range(len(rows)), key=lambda i: self.rows[rows[i]].turn)
            stop = start + 1
            while stop < len(rows) and (stop + 1 - start) * max(widths[start : stop + 1]) <= budget:
                stop += 1
        for row in rows[start:stop]:
            self.rows[row].turn = self._turn
        self._turn += 1
        return rows[start:stop], max(widths[start:stop])


def _reused(shared: int, prompt: Sequence[int], overlap: int) -> int:
    """How many tokens of a prefix are not processed again."""
    return max(0, min(shared, len(prompt) - 1) - overlap)


def _hashes(prompt: Sequence[int]) -> list[int]:
    """Of its first block, its first two, ..."""
    found, last = [], 0
    for end in range(_BLOCK, len(prompt) + 1, _BLOCK):
        last = hash((last, *prompt[end - _BLOCK : end]))
        found.append(last)
    return found


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two sequences share at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
