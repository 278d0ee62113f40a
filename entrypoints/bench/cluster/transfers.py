"""Pages that move between cores on a virtual clock: what the scheduler asks of a connector, by the rules of the
engine's own (leases end, so many readers, so long at most), in the time that a link takes."""

from __future__ import annotations

import functools
from collections import deque

import msgspec

from engine.kv_transfer.connector import READERS
from engine.kv_transfer.interface import FetchDone, LeaseEnded
from engine.kv_transfer.params import KVTransferParams
from engine.limits import Limits
from entrypoints.bench.cluster.clock import Clock
from entrypoints.bench.cluster.virtual_core import VirtualCore


class Link(msgspec.Struct, frozen=True):
    """From one server to another, whoever else uses it."""

    latency_s: float
    bytes_per_s: float


class _Offer(msgspec.Struct):
    source: VirtualConnector
    generation: int
    pages: dict[bytes, int]


class Transfers:
    """All of a cluster."""

    def __init__(self, clock: Clock, link: Link, limits: Limits, page_bytes: int) -> None:
        """`page_bytes`: of a block."""
        self.clock, self.link, self.limits, self.page_bytes = clock, link, limits, page_bytes
        self.offers: dict[str, _Offer] = {}
        """by the names of their leases"""
        self._connected = 0

    def connect(self, core: VirtualCore) -> VirtualConnector:
        self._connected += 1
        return VirtualConnector(self, core, f"engine-{self._connected}")


class _Fetch(msgspec.Struct):
    number: int
    lease: str
    pages: dict[bytes, int]
    asked_s: float


class VirtualConnector:
    """Both sides of one core."""

    def __init__(self, among: Transfers, core: VirtualCore, engine_id: str) -> None:
        self._among, self._core, self._engine_id = among, core, engine_id
        self.most_leases = among.limits.kv_leases
        self._waiting: deque[_Fetch] = deque()
        self._reading = 0

    def offer(self, generation: int, pages: dict[bytes, int]) -> KVTransferParams:
        name, among = self._name(generation), self._among
        among.offers[name] = _Offer(self, generation, pages)
        among.clock.at(self._core.now + among.limits.kv_lease_s, functools.partial(self.end, name, expired=True))
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._engine_id,
            remote_request_id=name,
            remote_block_ids=[*pages.values()],
            remote_host="127.0.0.1",
            remote_port=1,
        )

    def withdraw(self, generation: int) -> None:
        self._among.offers.pop(self._name(generation), None)

    def fetch(self, number: int, source: KVTransferParams, pages: dict[bytes, int]) -> None:
        self._waiting.append(_Fetch(number, source.remote_request_id or "", pages, self._core.now))
        self._among.clock.at(self._core.now, self._go_on)

    def failed(self, source: KVTransferParams, error: str) -> None:
        pass

    def end(self, name: str, expired: bool = False) -> None:
        """A lease of this core's; one that ended already is ignored."""
        offer = self._among.offers.pop(name, None)
        if offer is not None and not self._core.lost:
            self._core.put(LeaseEnded(generation=offer.generation, expired=expired))

    @property
    def lives(self) -> bool:
        return not self._core.lost

    def _name(self, generation: int) -> str:
        return f"{self._engine_id}.{generation}"

    def _go_on(self) -> None:
        while self._waiting and self._reading < READERS:
            self._reading += 1
            fetch, among = self._waiting.popleft(), self._among
            size, error = len(fetch.pages) * among.page_bytes, self._refused(fetch)
            seconds = among.link.latency_s + (0.0 if error else size / among.link.bytes_per_s)
            left = fetch.asked_s + among.limits.kv_fetch_s - among.clock.now
            if error is None and seconds > left:
                seconds, error = max(left, 0.0), "it took too long"
            among.clock.at(among.clock.now + seconds, functools.partial(self._ended, fetch, size, error, seconds))

    def _refused(self, fetch: _Fetch) -> str | None:
        offer = self._among.offers.get(fetch.lease)
        if offer is None or not offer.source.lives or not fetch.pages.keys() <= offer.pages.keys():
            return "there is no such lease, or its server is lost"
        if self._among.clock.now > fetch.asked_s + self._among.limits.kv_fetch_s:
            return "it waited too long for other fetches"
        return None

    def _ended(self, fetch: _Fetch, size: int, error: str | None, seconds: float) -> None:
        self._reading -= 1
        offer = self._among.offers.get(fetch.lease)
        if error is None and offer is not None:
            offer.source.end(fetch.lease)
        if fetch.pages:
            self._core.put(
                FetchDone(number=fetch.number, error=error, size_bytes=0 if error else size, seconds=seconds)
            )
        self._go_on()
