"""Which timings of linear layers cannot be true: a choice that rests on one is made again.

A layer of few rows streams its weights, so its time says a bandwidth, and bandwidths check each other. What disturbs a
timing (another process on the device, a clock that was still low, weights that lay in the L2) shows in one of three
ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import msgspec

ABOVE_COPY = 1.25
"""times a copy's bandwidth, measured beside: reading alone is up to 1.15 times as fast, more is no memory"""
BELOW_BUCKETS = 0.4
"""of the median over the same weights' numbers of rows: 1 to 16 rows take nearly the same time"""
BELOW_SMALLER = 0.33
"""of what a shape with no more weights reaches: bandwidth grows with size, because launches and tails weigh less"""


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One shape and bucket."""

    tile: str | None
    """name of the chosen tile; None: the library"""
    splits: int = 1
    us: float
    """of the chosen one"""
    library_us: float
    gb_per_s: float
    """weights over `us`"""


def doubts(shapes: Mapping[str, Mapping[int, Measured]], copy_gb_per_s: float) -> dict[str, str]:
    """Shape → why one of its timings is implausible. `copy_gb_per_s`: the best of a copy on the device."""
    found: dict[str, str] = {}
    sizes = {shape: max(_bytes(one) for one in rows.values()) for shape, rows in shapes.items()}
    typical = {shape: statistics.median(one.gb_per_s for one in rows.values()) for shape, rows in shapes.items()}
    for shape, buckets in shapes.items():
        for rows, one in buckets.items():
            if not 0 < one.gb_per_s <= ABOVE_COPY * copy_gb_per_s:
                found[shape] = f"{rows} rows at {one.gb_per_s:.0f} GB/s, where a copy reaches {copy_gb_per_s:.0f}"
            elif one.gb_per_s < BELOW_BUCKETS * typical[shape]:
                found[shape] = f"{rows} rows at {one.gb_per_s:.0f} GB/s, where others reach {typical[shape]:.0f}"
        for other, gb_per_s in typical.items():
            if sizes[other] <= sizes[shape] and typical[shape] < BELOW_SMALLER * gb_per_s and other not in found:
                found.setdefault(shape, f"{typical[shape]:.0f} GB/s, where {other} reaches {gb_per_s:.0f}")
    return found


def _bytes(one: Measured) -> float:
    return one.gb_per_s * one.us * 1e3
