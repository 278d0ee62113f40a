"""Sequences that wait for a row, in the order in which they start. No operation looks at all of them."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from engine.scheduling.sequence import Sequence, Status

_MOST_SORTED = 256
"""so many in the list at most, unless more are looked at"""
_CLASSES = 16
"""priorities farther from 0 count as this one"""
_Entry = tuple[tuple[int, int], Sequence]


class WaitingQueue:
    """Sorted by `Sequence.key`: the first few in a list, as many as somebody has looked at, the others in a heap. A
    preempted sequence returns with the key that it had, so ahead of all that came later.

    Removal from the middle is lazy: an entry whose sequence no longer waits is dropped when it surfaces, and all is
    rebuilt when more than half of it is such entries (amortized O(1) per removal), so aborted requests do not pile up.
    """

    def __init__(self) -> None:
        self._next: list[_Entry] = []
        """none of the heap's comes before one of these"""
        self._heap: list[_Entry] = []
        self._waiting = 0
        self.num_tokens = self.most_tokens = 0
        """of the prompts of all that wait, and of their answers at most"""
        self._classes: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return self._waiting

    def push(self, seq: Sequence) -> None:
        entry = (seq.key, seq)
        if self._next and entry < self._next[-1]:
            insort(self._next, entry)
            if len(self._next) > _MOST_SORTED:
                heapq.heappush(self._heap, self._next.pop())
        else:
            heapq.heappush(self._heap, entry)
        self._waiting += 1
        self._count(seq, 1)

    def _count(self, seq: Sequence, times: int) -> None:
        self.num_tokens += times * seq.prompt_len
        self.most_tokens += times * (seq.max_total - seq.prompt_len)
        count, tokens = self._classes.get(_class(seq), (0, 0))
        self._classes[_class(seq)] = count + times, tokens + times * seq.prompt_len

    def as_urgent(self, seq: Sequence) -> tuple[int, int]:
        """Sequences that are as urgent as this one, or more so, and tokens of their prompts."""
        found = [each for urgency, each in self._classes.items() if urgency <= _class(seq)]
        return sum(count for count, _ in found), sum(tokens for _, tokens in found)

    def first(self) -> Sequence | None:
        if not self._next or self._next[0][1].status is not Status.WAITING:
            self._look_at(1)
        return self._next[0][1] if self._next else None

    def ahead(self, count: int) -> list[Sequence]:
        """The first ones, at most `count`, that are as urgent as the first."""
        self._look_at(count)
        return [seq for key, seq in self._next[:count] if key[0] == self._next[0][0][0]]

    def _look_at(self, count: int) -> None:
        """So many are in the list, if there are, and wait."""
        self._next = [entry for entry in self._next if entry[1].status is Status.WAITING]
        while len(self._next) < count and self._heap:
            entry = heapq.heappop(self._heap)
            if entry[1].status is Status.WAITING:
                self._next.append(entry)

    def pop(self) -> None:
        """Remove what `first` returned."""
        self.take(self._next[0][1])

    def take(self, seq: Sequence) -> None:
        """Remove one of those that `first` or `ahead` returned last."""
        _, found = self._next.pop(bisect_left(self._next, seq.key, key=lambda entry: entry[0]))
        assert found is seq
        self._waiting -= 1
        self._count(seq, -1)

    def discard(self, seq: Sequence) -> None:
        """It was in the queue and has just stopped waiting (its status says so)."""
        self._waiting -= 1
        self._count(seq, -1)
        if len(self._heap) + len(self._next) > 2 * self._waiting + 16:
            self._look_at(0)
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)


def _class(seq: Sequence) -> int:
    """Its priority, as far as it is counted."""
    return min(max(seq.key[0], -_CLASSES), _CLASSES)
