"""Connector halves without a transport: pages come when a test says so, or as many of them as it says."""

from __future__ import annotations

from scheduler_loop import Loop

from engine.kv_transfer.interface import FetchDone, LeaseEnded
from engine.kv_transfer.params import KVTransferParams

ASKED = KVTransferParams(do_remote_decode=True)
Pages = dict[bytes, int]


class Link:
    """Both ends of a transport: the pages that `source` leases come into `target`'s host blocks when it is told so."""

    most_leases = 256

    def __init__(self) -> None:
        self.source: Loop | None = None
        self.target: Loop | None = None
        self.starts = 0
        """of the source: what it leased before is gone"""
        self.offered: dict[int, Pages] = {}
        """what the source gives out, by generation"""
        self.asked: list[tuple[int, KVTransferParams, Pages]] = []
        """what the target waits for: the fetch, from where, and the pages with their blocks"""
        self.failures: list[str] = []
        """why the target computed prompts that the source had computed"""

    def offer(self, generation: int, pages: Pages) -> KVTransferParams:
        self.offered[generation] = dict(pages)
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=str(self.starts),
            remote_request_id=str(generation),
            remote_host="here",
            remote_port=1,
        )

    def withdraw(self, generation: int) -> None:
        self.offered.pop(generation, None)

    def fetch(self, number: int, source: KVTransferParams, pages: Pages) -> None:
        self.asked.append((number, source, pages))

    def failed(self, source: KVTransferParams, error: str) -> None:
        self.failures.append(error)

    def expire(self, generation: int) -> None:
        assert self.source is not None
        if self.offered.pop(generation, None) is not None:
            self.source.scheduler.transferred(LeaseEnded(generation=generation, expired=True))

    def deliver(self, index: int = 0, most: int | None = None, told: bool = True) -> bool:
        """What was asked for comes: `most` pages of it, where the transport breaks. `told`: the source hears that it
        has arrived. Returns whether all came."""
        assert self.source is not None and self.target is not None
        number, params, pages = self.asked.pop(index)
        generation = int(params.remote_request_id or 0)
        there = self.offered.get(generation, {}) if params.remote_engine_id == str(self.starts) else {}
        came = pages.keys() <= there.keys() and bool(there) and most is None
        for key in [key for key in pages if key in there][:most]:
            self.target.executor.host_slots[pages[key]] = list(self.source.executor.slots[there[key]])
        if came and told:
            del self.offered[generation]
            self.source.scheduler.transferred(LeaseEnded(generation=generation))
        if number:
            done = FetchDone(number=number, error=None if came else "lost", size_bytes=len(pages))
            self.target.receive(self.target.scheduler.transferred(done))
        return came

    def start_source(self, **settings: object) -> Loop:
        """Anew, with nothing in it: what it had leased is gone."""
        self.starts += 1
        self.offered.clear()
        self.source = Loop(connector=self, **{"num_host_blocks": 0, **settings})  # type: ignore[arg-type]
        return self.source

    def start_target(self, **settings: object) -> Loop:
        """Anew: what it waited for comes to nobody."""
        self.asked.clear()
        self.target = Loop(connector=self, **{"num_host_blocks": 48, **settings})  # type: ignore[arg-type]
        return self.target
