"""Requests whose prompt another engine has computed: they wait, holding no row, while its pages come into blocks of the
host tier, where they are then found as any cached prefix is. Whatever goes wrong, the prompt is computed here.

A host block that was free may still be read by a step in flight, which was planned before. So nothing is written to
what is taken here before all steps that were planned then are complete.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from engine.core.wire import AddRequest
from engine.kv_cache.hash_chain import key_of
from engine.kv_cache.host_tier import HostTier
from engine.kv_transfer.interface import Connector, FetchDone
from engine.kv_transfer.params import KVTransferParams
from engine.layer_groups import first_kept
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.siblings import prefix_limit
from engine.scheduling.steps_in_flight import StepsInFlight


class _Fetch(msgspec.Struct):
    request: AddRequest
    samples: list[Sequence]
    source: KVTransferParams
    pages: dict[bytes, int]
    """what is to come, and the host blocks for it"""
    found: list[int]
    """host blocks that hold other parts of the prompt already"""


class Fetches:
    def __init__(
        self, held: Holdings, steps: StepsInFlight, connector: Connector | None, begun: Callable[[str], None]
    ) -> None:
        """`begun`: is told for whom pages are fetched."""
        self._held, self._kv, self._steps, self._connector, self._begun = held, held.kv, steps, connector, begun
        self._under_way: dict[int, _Fetch] = {}
        self._to_begin: list[tuple[int, int]] = []
        """(the step behind all that have to be complete before, the fetch)"""
        self._number = 0
        self.fetched = self.failed = self.size_bytes = 0
        self.seconds = 0.0
        """since the start: fetches that brought all, those that did not, and what the former took"""

    def __len__(self) -> int:
        """Sequences that wait for pages."""
        return sum(len(_alive(fetch)) for fetch in self._under_way.values())

    def begin(self, request: AddRequest, samples: list[Sequence]) -> bool:
        """Whether the request has to wait for pages: those that are not here already."""
        source, host = request.kv_transfer, self._kv.host
        if source is None or not source.do_remote_prefill or self._connector is None or host is None:
            return False
        self._begun(request.request_id)
        found, missing = self._look_up(host, samples[0])
        if not missing:
            self._connector.fetch(0, source, {})
            return False
        for block in found:
            host.pool.acquire(block)
        if host.writes_pending or host.pool.num_free < len(missing):
            self._release(host, found)
            self._connector.fetch(0, source, {})
            self._fail(source, "the host tier had no room for a prompt's pages (--swap-space)")
            return False
        self._number += 1
        pages = {key: host.pool.allocate() for key in missing}
        self._under_way[self._number] = _Fetch(request, samples.copy(), source, pages, found)
        for seq in samples:
            seq.status = Status.FETCHING
        self._to_begin.append((self._steps.next_id, self._number))
        self.go_on()
        return True

    def _look_up(self, host: HostTier, seq: Sequence) -> tuple[list[int], list[bytes]]:
        """Of the prompt's whole blocks: host blocks that hold some of it, and the keys of those that are nowhere."""
        kv = self._kv
        if seq.group is not None:
            return [], []
        count = max(prefix_limit(seq, kv), 0) // kv.block_size
        digests = seq.blocks.chain.digests_of(count, seq.tokens)
        found: list[int] = []
        missing: list[bytes] = []
        for group, window in enumerate(kv.windows):
            for index in range(first_kept(count * kv.block_size, window) // kv.block_size, count):
                key = key_of(digests[index], group)
                there = host.find(key)
                if there is not None:
                    found.append(there)
                elif kv.pool.find(key) is None:
                    missing.append(key)
        return found, missing

    def go_on(self) -> None:
        """To be called whenever a step is complete."""
        while self._to_begin and self._steps.are_complete(self._to_begin[0][0]):
            _, number = self._to_begin.pop(0)
            fetch = self._under_way[number]
            assert self._connector is not None
            if _alive(fetch):
                self._connector.fetch(number, fetch.source, fetch.pages)
            else:
                self._connector.fetch(0, fetch.source, {})
                self._give_back(number)

    def ended(self, done: FetchDone) -> tuple[AddRequest, list[Sequence]] | None:
        """Who may go on now; None: nobody waits any more."""
        fetch, host = self._under_way.get(done.number), self._kv.host
        if fetch is None or host is None:
            return None
        alive = _alive(fetch)
        if done.error is not None:
            self._fail(fetch.source, done.error)
        else:
            self.fetched += 1
            self.size_bytes += done.size_bytes
            self.seconds += done.seconds
            first = fetch.samples[0]
            self._kv.landed(first.blocks, first.tokens, fetch.pages)
        if not alive:
            self._give_back(done.number)
            return None
        del self._under_way[done.number]
        alive[0].landed = [*fetch.pages.values(), *fetch.found]
        return fetch.request, alive

    def _give_back(self, number: int) -> None:
        fetch, host = self._under_way.pop(number), self._kv.host
        assert host is not None
        self._release(host, [*fetch.pages.values(), *fetch.found])

    @staticmethod
    def _release(host: HostTier, blocks: list[int]) -> None:
        for block in blocks:
            host.pool.release(block)

    def _fail(self, source: KVTransferParams, error: str) -> None:
        assert self._connector is not None
        self.failed += 1
        self._connector.failed(source, error)


def _alive(fetch: _Fetch) -> list[Sequence]:
    return [seq for seq in fetch.samples if seq.status is Status.FETCHING]
