"""Both sides of one engine, for its scheduler (`interface.Connector`)."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from engine.config import EngineConfig
from engine.kv_transfer.complaints import Complaints
from engine.kv_transfer.exports import Exports
from engine.kv_transfer.frames import TransferError
from engine.kv_transfer.interface import FetchDone, Inform
from engine.kv_transfer.memory import KVMemory
from engine.kv_transfer.nixl_agent import NixlAgent
from engine.kv_transfer.params import KVTransferParams
from engine.kv_transfer.reader import fetch
from engine.kv_transfer.sources import Sources
from engine.kv_transfer.staging import Staging, Stagings

logger = logging.getLogger(__name__)

READERS = 4
"""fetches at a time"""


class EngineConnector:
    """Listens from the start, so that a port that is taken is told before a model is loaded."""

    def __init__(self, config: EngineConfig, inform: Inform, waits: bool = False) -> None:
        """`waits`: `fetch` does not return before it has ended, for a core that turns only while somebody waits for it.
        Raises `ConfigError`."""
        assert config.kv_transfer is not None
        self._inform, self._waits = inform, waits
        self.most_leases = config.limits.kv_leases
        self._timeout_s = config.limits.kv_fetch_s
        self._host = config.kv_transfer.kv_ip
        self._sources = Sources(config.kv_transfer.kv_sources)
        self._complaints = Complaints()
        self._memory: KVMemory | None = None
        self._exports: Exports | None = None
        extra = config.kv_transfer.kv_connector_extra_config
        nixl = None if extra is None else NixlAgent(f"pageloom-{secrets.token_hex(8)}", extra.backends)
        if config.kv_transfer.produces:
            limits, port = config.limits, config.kv_transfer.kv_port
            port += config.parallel.data_rank if port else 0
            self._exports = Exports(self._host, port, limits.kv_lease_s, limits.kv_fetch_s, inform, nixl)
            by = "over shared memory" if extra is None else f"by NIXL ({', '.join(extra.backends)})"
            logger.info("KV pages are read from %s:%d, and %s", self._host, self._exports.port, by)
        self._consumes = config.kv_transfer.consumes
        self._stagings = Stagings(READERS, Staging) if nixl is None else Stagings(READERS, nixl.memory)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        for index in range(READERS if self._consumes and not waits else 0):
            threading.Thread(target=self._run, name=f"kv-fetch-{index}", daemon=True).start()

    def attach(self, memory: KVMemory) -> None:
        """The cache is allocated."""
        self._memory = memory
        if self._exports is not None:
            self._exports.attach(memory)

    def offer(self, generation: int, pages: dict[bytes, int]) -> KVTransferParams:
        assert self._exports is not None
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._exports.engine_id,
            remote_request_id=self._exports.offer(generation, pages),
            remote_block_ids=[*pages.values()],
            remote_host=self._host,
            remote_port=self._exports.port,
        )

    def withdraw(self, generation: int) -> None:
        if self._exports is not None:
            self._exports.withdraw(generation)

    def fetch(self, number: int, source: KVTransferParams, pages: dict[bytes, int]) -> None:
        deadline = time.monotonic() + self._timeout_s

        def work() -> None:
            done = self._fetch(number, source, pages, deadline)
            if pages:
                self._inform(done)

        if self._waits:
            work()
        else:
            self._work.put(work)

    def failed(self, source: KVTransferParams, error: str) -> None:
        self._complaints.add(source, error)

    def close(self) -> None:
        """Idempotent. Fetches under way end by themselves, and are heard of no more."""
        if self._exports is not None:
            self._exports.close()
        self._stagings.close()
        for _ in range(READERS):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _fetch(self, number: int, source: KVTransferParams, pages: dict[bytes, int], deadline: float) -> FetchDone:
        began, error, size = time.monotonic(), None, 0
        try:
            if self._memory is None:
                raise TransferError("this engine has no pages yet")
            if source.tp_size != 1:
                raise TransferError(f"tp_size {source.tp_size}: only pages of whole heads are taken (tp_size 1)")
            self._sources.check(source.remote_host or "")
            left = deadline - began
            if left <= 0:  # slow sources hold up the others' prompts for so long at most
                raise TransferError("it waited too long for other fetches")
            size = fetch(source, pages, self._memory, self._stagings, left)
        except TransferError as failure:
            error = str(failure)
        except Exception as failure:
            logger.exception("KV pages could not be fetched")
            error = repr(failure)
        return FetchDone(number=number, error=error, size_bytes=size, seconds=time.monotonic() - began)
