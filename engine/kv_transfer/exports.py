"""The source's side: who has a lease's name gets its pages. Threads beside the core, which reads the cache itself:
blocks that a lease holds are full, and nobody writes to them.

A lease's name is 128 random bits, so that nobody reads keys and values who was not told of them; and a name is never
used twice, so that what is read late is never what took its place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time

import msgspec
import numpy as np
from msgspec.structs import replace

from engine.errors import ConfigError
from engine.kv_transfer.frames import Answer, Ask, RefusedError, Took, TransferError, Wire, is_of_this_user, local_name
from engine.kv_transfer.interface import Inform, LeaseEnded
from engine.kv_transfer.layout import differences
from engine.kv_transfer.memory import KVMemory
from engine.kv_transfer.nixl_agent import POLL_S, NixlAgent
from engine.kv_transfer.sources import check_address
from engine.kv_transfer.staging import Private, Stagings, mapped

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
"""being served at a time; more wait to be accepted"""
ASK_S = 10.0
"""in which a reader says what it wants; where others wait for a place, who has said nothing longest gives way before"""
_FULL_S = 0.05
"""until it is asked again whether there is room for one more"""


class _Offer(msgspec.Struct):
    generation: int
    pages: dict[bytes, int]
    deadline: float
    """on `time.monotonic`'s clock"""
    readers: int = 0
    """that copy its pages now: what is withdrawn waits for them"""


class Exports:
    """`offer` and `withdraw` are the core's; news go to `inform`, from any thread."""

    def __init__(
        self, host: str, port: int, lease_s: float, timeout_s: float, inform: Inform, nixl: NixlAgent | None = None
    ) -> None:
        """`port` 0: any. `lease_s`: how long pages wait for their reader; `timeout_s`: how long one may take. `nixl`:
        for readers that ask for it. Raises `ConfigError` where it cannot listen."""
        self.engine_id = secrets.token_hex(8)
        self._lease_s, self._timeout_s, self._inform = lease_s, timeout_s, inform
        self._memory: KVMemory | None = None
        self._lock = threading.Condition()
        """of offers; never held while pages are read or sent. Told when nobody reads an offer any more"""
        self._offers: dict[str, _Offer] = {}
        """by name, in the order of their deadlines"""
        self._names: dict[int, str] = {}
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._silent: dict[socket.socket, None] = {}
        """connections on which nothing has been asked yet, the oldest first"""
        self._private, self._nixl = Stagings(2, Private), nixl
        self._registered = None if nixl is None else Stagings(2, nixl.memory)
        self._closing = False
        self._tcp, self._local = _listen(host, port)
        self.port = int(self._tcp.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-exports", daemon=True)
        self._thread.start()

    def attach(self, memory: KVMemory) -> None:
        """From now on there is something to be read."""
        self._memory = memory

    def offer(self, generation: int, pages: dict[bytes, int]) -> str:
        """Its name."""
        name = f"{generation}.{secrets.token_hex(16)}"
        with self._lock:
            self._offers[name] = _Offer(generation, pages, time.monotonic() + self._lease_s)
            self._names[generation] = name
        if len(self._offers) == 1:
            os.eventfd_write(self._wake, 1)
        return name

    def withdraw(self, generation: int) -> None:
        with self._lock:
            self._take(self._names.get(generation, ""))

    def close(self) -> None:
        """Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for stagings in (self._private, self._registered):
            if stagings is not None:
                stagings.close()
        self._tcp.close()
        self._local.close()
        os.close(self._wake)

    def _run(self) -> None:
        poll = select.poll()
        for each in (self._tcp.fileno(), self._local.fileno(), self._wake):
            poll.register(each, select.POLLIN)
        while not self._closing:
            for descriptor, _ in poll.poll(self._until_next_end_ms()):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._accept(self._tcp if descriptor == self._tcp.fileno() else self._local)
            self._end_overdue()

    def _until_next_end_ms(self) -> int | None:
        with self._lock:
            first = next(iter(self._offers.values()), None)
        return None if first is None else max(int(1000 * (first.deadline - time.monotonic())) + 1, 1)

    def _end_overdue(self) -> None:
        with self._lock:
            now = time.monotonic()
            overdue = [name for name, offer in self._offers.items() if offer.deadline <= now]
        for name in overdue:
            self._end(name, expired=True)

    def _end(self, name: str, expired: bool = False) -> None:
        with self._lock:
            offer = self._take(name)
        if offer is not None:
            self._inform(LeaseEnded(generation=offer.generation, expired=expired))

    def _take(self, name: str) -> _Offer | None:
        """With the lock held: nobody finds it any more, and nobody reads it."""
        offer = self._offers.pop(name, None)
        if offer is not None:
            self._names.pop(offer.generation, None)
            self._lock.wait_for(lambda: not offer.readers)
        return offer

    def _accept(self, listener: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            self._hang_up_on_the_oldest_silent()
            if not self._places.acquire(timeout=_FULL_S):
                return  # it waits in the backlog
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # it has left
            self._places.release()
            return
        except OSError:
            self._places.release()
            time.sleep(_FULL_S)  # too many descriptors are open, and the listener stays readable
            return
        if connection.family == socket.AF_UNIX and not is_of_this_user(connection):
            self._let_go(connection)
            return
        with self._lock:
            self._silent[connection] = None
        try:
            threading.Thread(target=self._serve, args=(connection,), name="kv-export", daemon=True).start()
        except RuntimeError as error:
            logger.error("a reader of KV pages is turned away: %s", error)
            self._let_go(connection)

    def _hang_up_on_the_oldest_silent(self) -> None:
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is not None:
                del self._silent[oldest]
                with contextlib.suppress(OSError):  # it has left
                    oldest.shutdown(socket.SHUT_RDWR)

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(Wire(connection, time.monotonic() + min(self._timeout_s, ASK_S)))
        except TransferError as error:
            logger.debug("a reader of KV pages left: %s", error)
        except Exception:
            logger.exception("KV pages could not be given out")
        finally:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._speaks(connection)
        connection.close()
        self._places.release()

    def _speaks(self, connection: socket.socket) -> None:
        with self._lock:
            self._silent.pop(connection, None)

    def _answer(self, wire: Wire) -> None:
        descriptors: list[int] = []
        try:
            local = wire.socket.family == socket.AF_UNIX
            ask = wire.receive_with(Ask, descriptors) if local else wire.receive(Ask)
            self._speaks(wire.socket)
            wire.until(time.monotonic() + self._timeout_s)
            if not ask.keys:
                self._end(ask.lease)
                wire.send(Answer())
                return
            try:
                self._give(wire, ask, self._check(ask, local, descriptors), descriptors)
            except RefusedError as error:
                wire.send(Answer(error=str(error)))
                return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        wire.receive(Took)
        self._end(ask.lease)

    def _check(self, ask: Ask, local: bool, descriptors: list[int]) -> KVMemory:
        """Before memory is taken for a stranger. Raises `RefusedError`."""
        memory = self._memory
        if memory is None or ask.engine_id != self.engine_id:
            raise RefusedError("this engine was started later: what it had then is gone")
        if unlike := differences(memory.layout, ask.layout):
            raise RefusedError(f"this prefill server and the decode server differ: {unlike}")
        if ask.nixl and self._nixl is None:
            raise RefusedError("no NIXL here: give both engines the same kv_connector_extra_config, or neither")
        if len(descriptors) != (local and not ask.nixl):
            raise RefusedError("pages are written to one descriptor of the reader's")
        with self._lock:
            self._leased(ask)
        return memory

    def _give(self, wire: Wire, ask: Ask, memory: KVMemory, descriptors: list[int]) -> None:
        size = len(ask.keys) * memory.device.page_bytes
        if descriptors:
            with mapped(descriptors[0], size) as room:
                wire.send(self._pack(ask, memory, room))
        elif ask.nixl and self._registered is not None:
            with self._registered.of("", size) as registered:
                answer = self._pack(ask, memory, registered.bytes[:size])
                wire.send(replace(answer, metadata=registered.metadata, address=registered.address))
                while not wire.is_readable(POLL_S):  # until it says that it has them, or has left
                    registered.progress()
        else:
            with self._private.of("", size) as private:
                wire.send(self._pack(ask, memory, private.bytes[:size]))
                wire.send_pages(private.bytes[:size])

    def _pack(self, ask: Ask, memory: KVMemory, into: np.ndarray) -> Answer:
        with self._lock:
            blocks, offer = self._leased(ask), self._offers[ask.lease]
            offer.readers += 1
        try:
            memory.device.pack(blocks, into)
        finally:
            with self._lock:
                offer.readers -= 1
                self._lock.notify_all()
        return Answer(size=into.size, checksum=memory.device.checksum(into, len(ask.keys)))

    def _leased(self, ask: Ask) -> list[int]:
        """The blocks of its keys. Raises `RefusedError`."""
        offer = self._offers.get(ask.lease)
        if offer is None:
            raise RefusedError("there is no such lease: it was read, its time was over, or it gave way")
        blocks = [offer.pages[key] for key in ask.keys if key in offer.pages]
        if len(blocks) < len(ask.keys) or len(blocks) > len(offer.pages):
            raise RefusedError("the lease has no such pages: they are of another prompt, or salt")
        return blocks


def _listen(host: str, port: int) -> tuple[socket.socket, socket.socket]:
    """By TCP, and for readers on this host."""
    tcp = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        tcp = socket.socket(family, kind, protocol)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind(address)
        tcp.listen(128)
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind(local_name(tcp.getsockname()[1]))
        local.listen(128)
    except (OSError, OverflowError, UnicodeError) as error:
        if tcp is not None:
            tcp.close()
        check_address(host)
        raise ConfigError(
            f"kv_transfer_config: cannot listen on {host}:{port}: {error}; choose another kv_port"
        ) from None
    tcp.setblocking(False)
    local.setblocking(False)
    return tcp, local
