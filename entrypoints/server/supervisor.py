"""What systemd is told: ready, stopping, alive (`sd_notify(3)`, `Type=notify`, `WatchdogSec=`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Supervisor:
    """Does nothing where nobody listens."""

    def __init__(self, environment: Mapping[str, str], pid: int) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        own = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        self._watches = own and environment.get("WATCHDOG_USEC", "0").isdecimal()
        self._watches = self._watches and int(environment.get("WATCHDOG_USEC", "0")) > 0

    @property
    def is_there(self) -> bool:
        return bool(self._address)

    @property
    def watches(self) -> bool:
        """It wants to hear `alive` again and again."""
        return self._watches and bool(self._address)

    def ready(self, status: str) -> None:
        self._tell(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def alive(self) -> None:
        self._tell("WATCHDOG=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(state.encode(), self._address)
