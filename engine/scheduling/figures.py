"""What the scheduler tells of itself."""

from __future__ import annotations

from engine.core.wire import CoreStats
from engine.scheduling.arrivals import Arrivals
from engine.scheduling.fetches import Fetches
from engine.scheduling.holdings import Holdings
from engine.scheduling.outcomes import Outcomes
from engine.scheduling.speculation import Speculation


def core_stats(
    held: Holdings,
    arrivals: Arrivals,
    fetches: Fetches,
    speculation: Speculation,
    outcomes: Outcomes,
    num_steps: int,
    prompt_tokens: int,
) -> CoreStats:
    kv, host = held.kv.stats(), held.kv.host
    return CoreStats(
        running=len(held.running),
        waiting=arrivals.num_waiting,
        kv_blocks_total=kv.total,
        kv_blocks_used=kv.used,
        kv_blocks_pinned=held.pins.num_blocks,
        kv_blocks_cached=kv.cached_free,
        steps=num_steps,
        preemptions=held.preemptions,
        preemptions_swapped=held.swapped,
        host_blocks_total=host.pool.num_blocks if host else 0,
        host_blocks_used=host.pool.num_used if host else 0,
        host_blocks_cached=host.pool.num_cached if host else 0,
        blocks_swapped_out=host.swapped_out if host else 0,
        blocks_swapped_in=host.swapped_in if host else 0,
        prefix_query_tokens=kv.query_tokens,
        prefix_hit_tokens=kv.hit_tokens,
        prompt_tokens=prompt_tokens,
        kv_fetches=fetches.fetched,
        kv_fetch_failures=fetches.failed,
        kv_fetched_bytes=fetches.size_bytes,
        kv_fetch_s=fetches.seconds,
        kv_leases=len(held.leases),
        kv_leases_expired=held.leases.expired,
        kv_leases_gave_way=held.leases.gave_way,
        generated_tokens=outcomes.generated_tokens,
        drafts=speculation.drafts,
        drafted_tokens=speculation.drafted,
        accepted_tokens=speculation.accepted,
        accepted_at=speculation.accepted_at,
    )
