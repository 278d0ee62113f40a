"""The buddy allocator that the paper assumes of Orca (§6.1): contiguous chunks whose sizes are powers of two.

Memory of any size: it is cut into powers of two, the largest first, so that each piece starts at a multiple of its
size, and buddies merge up to such a piece.
"""

from __future__ import annotations


class BuddyAllocator:
    """Units 0 .. size-1. `allocate` and `free` cost O(log size)."""

    def __init__(self, size: int) -> None:
        """Raises ValueError if `size` is not positive."""
        if size < 1:
            raise ValueError(f"a buddy allocator needs memory, got size={size}")
        self.size = size
        self.num_free = size
        self._free: dict[int, set[int]] = {order: set() for order in range(size.bit_length())}
        """order → starts of free chunks of 2**order units"""
        self._order_of: dict[int, int] = {}
        """start → order, of chunks in use"""
        self._roots: dict[int, int] = {}
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._roots[start] = order
                self._free[order].add(start)
                start += 1 << order

    def fits(self, units: int) -> bool:
        """Whether `allocate` would succeed."""
        return any(self._free[order] for order in range(_order(units), len(self._free)))

    def allocate(self, units: int) -> int | None:
        """Start of a chunk of `chunk_size(units)`, or None. The smallest free chunk that is large enough is split, the
        lowest of equals."""
        order = _order(units)
        at = next((higher for higher in range(order, len(self._free)) if self._free[higher]), None)
        if at is None:
            return None
        start = min(self._free[at])
        self._free[at].remove(start)
        for lower in reversed(range(order, at)):
            self._free[lower].add(start + (1 << lower))
        self._order_of[start] = order
        self.num_free -= 1 << order
        return start

    def free(self, start: int) -> None:
        """Give a chunk back and merge it with its buddy, as long as that one is free. KeyError if it is not in use."""
        order = self._order_of.pop(start)
        self.num_free += 1 << order
        while self._roots.get(start) != order and (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


def chunk_size(units: int) -> int:
    """What is taken for `units`: the next power of two."""
    return 1 << _order(units)


def _order(units: int) -> int:
    return (units - 1).bit_length()
