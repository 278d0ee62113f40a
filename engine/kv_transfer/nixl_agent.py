"""Pages by NIXL: the source packs them into memory that its agent has registered, and the reader's agent reads them.

Agents have no thread of their own (NIXL's spins): whoever waits for a transfer, on either side, turns its agent.

NIXL cannot take back a transfer that has begun: over TCP, bytes come into memory that was deregistered, and a late read
of memory that is gone ends the source. So registered memory is used again, but never unmapped, and what a read that did
not end may still write to is used by nobody any more.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.kv_transfer.frames import TransferError

logger = logging.getLogger(__name__)

POLL_S = 0.0002
MOST_KNOWN = 1024
"""regions of sources that a reader remembers; older sources are connected to anew"""
MOST_LOST = 64
"""regions that a reader gives up to reads which did not end; then it reads nothing by NIXL any more"""


class NixlAgent:
    """One an engine, from any thread."""

    def __init__(self, name: str, backends: Sequence[str]) -> None:
        """`name`: no other agent's; `backends`: NIXL's own names. Raises `ConfigError`."""
        library = _library()
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to the standard output
        self._lock = threading.Lock()
        """around every call: agents know of no threads"""
        try:
            config = library.nixl_agent_config(enable_prog_thread=False, backends=[*backends])
            self._agent: Any = library.nixl_agent(name, config)
        except Exception as error:
            raise ConfigError(f"kv_transfer_config: NIXL does not start: {error!r}") from error
        missing = [each for each in backends if each not in self._agent.backends]
        if missing:
            raise ConfigError(f"kv_transfer_config: this NIXL has no backend {', '.join(missing)}")
        logger.warning(
            "NIXL (%s): who may ask for pages can reach all memory of this process, so let none but trusted hosts",
            ", ".join(backends),
        )
        self._known: dict[bytes, str] = {}
        """agents' names by metadata, the oldest first"""
        self._reading: Counter[str] = Counter()
        """how many reads are under way from each"""
        self._spare: list[Registered] = []
        self._lost: list[tuple[Registered, Any]] = []
        """with the transfers that may still write to them"""

    def memory(self, size: int) -> Registered:
        """Of as many bytes or more."""
        with self._lock:
            fits = [each for each in self._spare if each.bytes.size >= size]
            if fits:
                found = min(fits, key=lambda each: each.bytes.size)
                self._spare.remove(found)
                return found
        return Registered(self, 1 << (size - 1).bit_length())

    def take_back(self, memory: Registered) -> None:
        with self._lock:
            if all(memory is not lost for lost, _ in self._lost):
                self._spare.append(memory)

    def register(self, address: int, size: int) -> bytes:
        """Metadata, by which others read this region."""
        with self._lock:
            region = self._agent.register_memory([(address, size, 0, "")], "DRAM")
            metadata: bytes = self._agent.get_partial_agent_metadata(region, inc_conn_info=True)
        return metadata

    def progress(self) -> None:
        """Some transports need the source's hand."""
        with self._lock:
            self._agent.get_new_notifs()

    def read(self, metadata: bytes, remote: int, into: Registered, size: int, deadline: float) -> None:
        """From address `remote` of the agent that `metadata` is of. Raises `TransferError`; where something may still
        be written to `into`, it is lost."""
        if len(self._lost) >= MOST_LOST:
            raise TransferError(f"{MOST_LOST} reads by NIXL did not end, and more memory is not given up: start anew")
        name = None
        try:
            with self._lock:
                name = self._learn(metadata)
                self._reading[name] += 1
                there, here = (self._agent.get_xfer_descs([(each, size, 0)], "DRAM") for each in (remote, into.address))
                transfer = self._agent.initialize_xfer("READ", here, there, name)
        except Exception as error:
            self._forget(name)
            raise TransferError(f"NIXL does not begin: {error!r}") from error
        try:
            self._wait(transfer, deadline)
        except Exception as error:
            with self._lock:
                self._lost.append((into, transfer))
            into.drop()
            self._forget(name)
            raise error if isinstance(error, TransferError) else TransferError(f"NIXL: {error!r}") from error
        with self._lock:
            transfer.release()
            self._reading[name] -= 1

    def _wait(self, transfer: Any, deadline: float) -> None:
        with self._lock:
            state = self._agent.transfer(transfer)
        while state == "PROC":
            if time.monotonic() > deadline:
                raise TransferError("it took too long")
            time.sleep(POLL_S)
            with self._lock:
                state = self._agent.check_xfer_state(transfer)
        if state != "DONE":
            raise TransferError(f"NIXL ended with {state}")

    def _learn(self, metadata: bytes) -> str:
        if metadata not in self._known:
            idle = [name for name in self._known.values() if not self._reading[name]]
            if len(self._known) >= MOST_KNOWN and idle:
                self._remove(idle[0])
            name = self._agent.add_remote_agent(metadata)
            self._known[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._known[metadata]

    def _forget(self, name: str | None) -> None:
        """After a failure: it is connected to anew, and what else is read from it now fails, too."""
        with self._lock:
            if name is not None:
                self._reading[name] -= 1
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._known = {metadata: each for metadata, each in self._known.items() if each != name}
        with contextlib.suppress(Exception):  # it knows already that it is gone
            self._agent.remove_remote_agent(name)


class Registered:
    """Private memory that other agents may read while they know its metadata (`staging.Memory`)."""

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self._mapped = mmap.mmap(-1, size)
        self.bytes: np.ndarray = np.frombuffer(self._mapped, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._agent = agent
        self.metadata = agent.register(self.address, size)

    def read(self, metadata: bytes, address: int, size: int, deadline: float) -> None:
        """The first `size` bytes, from another engine's. Raises `TransferError`."""
        self._agent.read(metadata, address, self, size, deadline)

    def progress(self) -> None:
        self._agent.progress()

    def drop(self) -> None:
        """What it holds; what is written later is written, and means nothing."""
        self._mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self._agent.take_back(self)


def _library() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            "kv_transfer_config: kv_connector_extra_config names NIXL's backends, and NIXL cannot be imported "
            f"({error}): pip install 'pageloom[nixl]', or leave it out for shared memory and TCP"
        ) from None
