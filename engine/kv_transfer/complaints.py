"""Why prompts are computed here whose pages were promised, in the log: often enough to be seen, and never as often as
there are requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from engine.kv_transfer.params import KVTransferParams

logger = logging.getLogger(__name__)

EVERY_S = 60.0
"""between two lines of one source and cause"""
MOST = 64
"""sources and causes that are told apart: requests name sources"""
_SHOWN = 500
"""characters of a cause, which another process may have written"""


class Complaints:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str] | None, tuple[float, int]] = {}
        """when, and how many came since"""

    def add(self, source: KVTransferParams, cause: str) -> None:
        """One line for the first of a source and cause, then one a minute that says how many it stands for."""
        server, cause = f"{source.remote_host}:{source.remote_port}", cause[:_SHOWN]
        key: tuple[str, str] | None = (server, cause)
        if key not in self._told and len(self._told) >= MOST:
            key = None
        now = self._clock()
        told, since = self._told.get(key, (now - EVERY_S, 0))
        since += 1
        if now - told >= EVERY_S:
            what = "a prompt is" if since == 1 else f"{since} prompts were"
            logger.warning("%s computed here, for pages did not come from %s: %s", what, server, cause)
            told, since = now, 0
        self._told[key] = told, since
