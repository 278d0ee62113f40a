"""What several replicas tell of themselves, as one core would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.wire import CoreReady, CoreStats

_GAUGES = frozenset(
    {
        "running",
        "waiting",
        "kv_blocks_total",
        "kv_blocks_used",
        "kv_blocks_pinned",
        "kv_blocks_cached",
        "host_blocks_total",
        "host_blocks_used",
        "host_blocks_cached",
        "kv_leases",
        "compiling",
        "compile_failed",
        "profiling",
        "asleep",
        "replicas",
    }
)


def ready_of_all(ready: Sequence[CoreReady]) -> CoreReady:
    first = ready[0]
    if len(ready) == 1:
        return first
    ledgers = [f"replica {index}:\n{each.ledger}" for index, each in enumerate(ready)]
    return msgspec.structs.replace(
        first,
        num_blocks=sum(each.num_blocks for each in ready),
        ledger="\n".join(ledgers) if len({each.ledger for each in ready}) > 1 else f"each replica:\n{first.ledger}",
        pieces_compiled=sum(each.pieces_compiled for each in ready),
        startup_seconds=max(each.startup_seconds for each in ready),
        compiling=any(each.compiling for each in ready),
    )


def stats_of_all(latest: Sequence[CoreStats], gone: CoreStats) -> CoreStats:
    """`latest`: of each replica; `gone`: what those have counted that are no more (`counters_of`)."""
    stats = [gone, *latest]
    return CoreStats(**{name: _sum([getattr(each, name) for each in stats]) for name in CoreStats.__struct_fields__})


def counters_of(stats: CoreStats) -> CoreStats:
    """Without what is true of a core only while it is there."""
    return CoreStats(
        **{name: getattr(stats, name) for name in CoreStats.__struct_fields__ if name not in _GAUGES}, replicas=0
    )


def _sum(values: list[Any]) -> Any:
    """Numbers are added up, of lists and mappings by their places; a flag is set where one is."""
    first = values[0]
    if isinstance(first, bool):
        return any(values)
    if isinstance(first, dict):
        keys = dict.fromkeys(key for each in values for key in each)
        return {key: sum(each.get(key, 0.0) for each in values) for key in keys}
    if isinstance(first, list):
        length = max(len(each) for each in values)
        return [sum(each[index] for each in values if index < len(each)) for index in range(length)]
    return sum(values)
