"""Sequences that wait for a row, in the order in which they start. No operation looks at all of them."""

from __future__ import annotations

import heapq

from engine.scheduling.sequence import Sequence, Status


class WaitingQueue:
    """A heap by `Sequence.key`. A preempted sequence returns with the key that it had, so ahead of all that came later.

    Removal from the middle is lazy: an entry whose sequence no longer waits is dropped when it surfaces, and the heap
    is rebuilt when more than half of it is such entries (amortized O(1) per removal), so aborted requests do not pile
    up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting = 0
        self.num_tokens = 0
        """of the prompts of all that wait"""

    def __len__(self) -> int:
        return self._waiting

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.key, seq))
        self._waiting += 1
        self.num_tokens += seq.prompt_len

    def first(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> None:
        """Remove what `first` returned."""
        _, seq = heapq.heappop(self._heap)
        self._waiting -= 1
        self.num_tokens -= seq.prompt_len

    def ahead(self, count: int) -> list[Sequence]:
        """The first ones, at most `count`, that are as urgent as the first."""
        found, first = list[Sequence](), self.first()
        while (seq := self.first()) is not None and len(found) < count and first and seq.key[0] == first.key[0]:
            found.append(seq)
            heapq.heappop(self._heap)
        for seq in found:
            heapq.heappush(self._heap, (seq.key, seq))
        return found

    def take(self, seq: Sequence) -> None:
        """Remove one of those that `ahead` found; the nearer to the head, the sooner."""
        passed = list[Sequence]()
        while (first := self.first()) is not seq:
            assert first is not None
            passed.append(first)
            heapq.heappop(self._heap)
        self.pop()
        for each in passed:
            heapq.heappush(self._heap, (each.key, each))

    def discard(self, seq: Sequence) -> None:
        """It was in the queue and has just stopped waiting (its status says so)."""
        self._waiting -= 1
        self.num_tokens -= seq.prompt_len
        if len(self._heap) > 2 * self._waiting + 16:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
