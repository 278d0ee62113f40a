"""Two hosts on this machine: network namespaces that a slow and lossy cable joins, or nothing once it is cut.

Needs root and Linux's TUN driver: each namespace has a TAP interface, and a thread carries
frames from one to the other.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65536


def can_make_hosts() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and os.path.exists("/dev/net/tun")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Host:
    """A network namespace; what is started by way of `prefix` has its address only."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.prefix = ["ip", "netns", "exec", name]

    @contextmanager
    def plugged(self) -> Iterator[int]:
        """The other end of its interface: frames that it sends are read there, and those written there reach it."""
        run("ip", "netns", "add", self.name)
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            try:
                fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", self.name.encode(), IFF_TAP | IFF_NO_PI))
                run("ip", "link", "set", self.name, "netns", self.name)
                run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.name)
                for link in (self.name, "lo"):
                    run("ip", "-n", self.name, "link", "set", link, "up")
                yield end
            finally:
                os.close(end)
        finally:
            run("ip", "netns", "del", self.name)


class Cable:
    """Carries frames both ways, each after `delay` and up to `jitter` seconds more, in their order; loses some."""

    def __init__(self, ends: tuple[int, int], *, delay: float, jitter: float, lost: float, seed: int = 0) -> None:
        self.other = {ends[0]: ends[1], ends[1]: ends[0]}
        self.delay, self.jitter, self.lost = delay, jitter, lost
        self.chance = random.Random(seed)
        self.under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
        self.carried = self.dropped = 0
        self.is_cut = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)

    def __enter__(self) -> Cable:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.set()
        self._thread.join()

    def _carry(self) -> None:
        with selectors.DefaultSelector() as selector:
            for end in self.other:
                selector.register(end, selectors.EVENT_READ)
            while not self._ends.is_set():
                due = min((queue[0][0] for queue in self.under_way.values() if queue), default=time.monotonic() + 0.05)
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    self._take(key.fd)
                for end, queue in self.under_way.items():
                    while queue and queue[0][0] <= time.monotonic():
                        self._give(end, queue.popleft()[1])

    def _take(self, end: int) -> None:
        frame = os.read(end, FRAME_BYTES)
        if self.is_cut.is_set() or self.chance.random() < self.lost:
            self.dropped += 1
            return
        queue = self.under_way[self.other[end]]
        arrives = time.monotonic() + self.delay + self.chance.random() * self.jitter
        queue.append((max(arrives, queue[-1][0] if queue else 0.0), frame))

    def _give(self, end: int, frame: bytes) -> None:
        if not self.is_cut.is_set():
            os.write(end, frame)
            self.carried += 1


@contextmanager
def two_hosts(*, delay: float, jitter: float, lost: float) -> Iterator[tuple[Host, Host, Cable]]:
    here, there = (Host(f"pl{os.getpid() % 100000}{side}", f"10.77.0.{1 + at}") for at, side in enumerate("ab"))
    with ExitStack() as stack:
        ends = (stack.enter_context(here.plugged()), stack.enter_context(there.plugged()))
        yield here, there, stack.enter_context(Cable(ends, delay=delay, jitter=jitter, lost=lost))
