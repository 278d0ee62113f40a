"""Pages by NIXL: the source packs them into memory that its agent has registered, and the reader's agent reads them.

Agents have no thread of their own (NIXL's spins): whoever waits for a transfer, on either side, turns its agent.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.kv_transfer.frames import TransferError

POLL_S = 0.0002
MOST_KNOWN = 64
"""regions of sources that a reader remembers; older sources are connected to anew"""


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
        self._known: dict[bytes, str] = {}
        """agents' names by metadata, the oldest first"""

    def memory(self, size: int) -> Registered:
        return Registered(self, size)

    def register(self, address: int, size: int) -> tuple[Any, bytes]:
        """For `deregister`; and metadata, by which others read this region."""
        with self._lock:
            region = self._agent.register_memory([(address, size, 0, "")], "DRAM")
            return region, self._agent.get_partial_agent_metadata(region, inc_conn_info=True)

    def deregister(self, region: Any) -> None:
        with self._lock:
            self._agent.deregister_memory(region)

    def progress(self) -> None:
        """Some transports need the source's hand."""
        with self._lock:
            self._agent.get_new_notifs()

    def read(self, metadata: bytes, remote: int, local: int, size: int, deadline: float) -> None:
        """From address `remote` of the agent that `metadata` is of, to `local`. Raises `TransferError`: nothing is
        written to `local` then any more."""
        try:
            with self._lock:
                name = self._learn(metadata)
                there, here = (self._agent.get_xfer_descs([(each, size, 0)], "DRAM") for each in (remote, local))
                transfer = self._agent.initialize_xfer("READ", here, there, name)
        except Exception as error:
            self._forget(metadata)
            raise TransferError(f"NIXL does not begin: {error!r}") from error
        try:
            self._wait(transfer, deadline)
        except Exception as error:
            self._forget(metadata, transfer)
            raise error if isinstance(error, TransferError) else TransferError(f"NIXL: {error!r}") from error
        with self._lock:
            transfer.release()

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
            while len(self._known) >= MOST_KNOWN:
                self._remove(next(iter(self._known.values())))
            name = self._agent.add_remote_agent(metadata)
            self._known[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._known[metadata]

    def _forget(self, metadata: bytes, transfer: Any = None) -> None:
        """After a failure: it is connected to anew, and what else is read from it now fails, too."""
        with self._lock:
            if transfer is not None:
                with contextlib.suppress(Exception):
                    transfer.release()
            if metadata in self._known:
                self._remove(self._known[metadata])

    def _remove(self, name: str) -> None:
        self._known = {metadata: each for metadata, each in self._known.items() if each != name}
        with contextlib.suppress(Exception):  # it knows already that it is gone
            self._agent.remove_remote_agent(name)


class Registered:
    """Private memory that other agents may read while they know its metadata (`staging.Memory`)."""

    def __init__(self, agent: NixlAgent, size: int) -> None:
        self.bytes: np.ndarray = np.empty(size, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self._agent = agent
        self._region, self.metadata = agent.register(self.address, size)

    def read(self, metadata: bytes, address: int, size: int, deadline: float) -> None:
        """The first `size` bytes, from another engine's. Raises `TransferError`."""
        self._agent.read(metadata, address, self.address, size, deadline)

    def progress(self) -> None:
        self._agent.progress()

    def close(self) -> None:
        self._agent.deregister(self._region)


def _library() -> Any:
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise ConfigError(
            "kv_transfer_config: kv_connector_extra_config names NIXL's backends, and NIXL cannot be imported "
            f"({error}): pip install 'pageloom[nixl]', or leave it out for shared memory and TCP"
        ) from None
