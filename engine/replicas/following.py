"""Cores that start in the place of those that died."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.client import ProcessClient
from engine.errors import CoreDiedError
from engine.replicas.fleet import Fleet
from engine.replicas.replica import Replica
from engine.replicas.restarts import WINDOW_S, Restarts

logger = logging.getLogger(__name__)

LEAST_START_S = 600.0
STARTS = 5
"""times the longest start so far: what a core takes that hangs in its start; weights may be in no cache any more"""


class Following:
    """Part of a `ReplicatedClient`."""

    _fleet: Fleet[ProcessClient]
    _restarts: Restarts
    _changing: threading.RLock
    _leaving: threading.Event
    _wake: int
    _wanted: int
    _asleep: bool
    _closed: bool
    _abandoned: bool
    _died: str | None

    def __init__(self) -> None:
        self._following: set[threading.Thread] = set()
        """who starts a core now, or soon"""
        self._later: threading.Thread | None = None
        self._start_s: float | None = None
        """the longest that a core has taken until it served"""

    def _follow_in(self, wait_s: float) -> None:
        """Another core is started then, in a thread of its own, until one serves or too many have died."""
        thread = threading.Thread(target=self._follow, args=(wait_s,), name="restart", daemon=True)
        self._following.add(thread)
        thread.start()

    def _follow(self, wait_s: float | None) -> None:
        while wait_s is not None and not self._leaving.wait(wait_s):
            wait_s = self._try_to_follow()
        self._following.discard(threading.current_thread())
        if not self._closed:
            os.eventfd_write(self._wake, 1)  # whoever receives listens to it, or learns that nothing follows

    def _follow_later(self) -> None:
        """Too many have died, and others serve: when those deaths do not count any more, as many as should serve do."""
        if self._later is not None and self._later.is_alive():
            return

        def follow() -> None:
            if not self._leaving.wait(WINDOW_S):
                for _ in range(self._missing):
                    self._follow_in(0.0)

        left = len(self._fleet.replicas)
        logger.error("too many cores have died: none is started for %g s, and %d go on alone", WINDOW_S, left)
        self._later = threading.Thread(target=follow, name="restart later", daemon=True)
        self._later.start()

    def _try_to_follow(self) -> float | None:
        """Start a core in the place of one that died. Returns when to try again, in seconds; None: there is no need."""
        try:
            with self._changing:
                self._check_open()
                if self._asleep or self._missing <= 0:
                    self._restarts.started()
                    self._fleet.nobody_comes()
                    return None
                self._serve(self._start_one(in_time=True))
                self._fleet.tell()
        except Exception as error:
            if self._closed or self._abandoned or self._died is not None:
                return None
            died = isinstance(error, CoreDiedError)
            logger.error("a core that was to follow another one did not start: %s", error, exc_info=not died)
            self._fleet.start_failed()
            wait_s = self._restarts.did_not_start(time.monotonic())
            if wait_s is None and not self._fleet.replicas:
                self._died = str(error)
            elif wait_s is None:
                self._fleet.nobody_comes()
                self._follow_later()
            return wait_s
        return None

    @property
    def _missing(self) -> int:
        """Cores that are to serve, and do not."""
        return self._wanted - sum(not each.draining for each in self._fleet.replicas)

    @contextmanager
    def _starts(self, client: ProcessClient, in_time: bool) -> Iterator[None]:
        """`in_time`: nobody has asked for it; if it takes much longer than those before, it hangs, and is killed. What
        somebody has asked for takes as long as he waits."""
        began, timer = time.monotonic(), None
        if in_time and self._start_s is not None:
            limit_s = max(LEAST_START_S, STARTS * self._start_s)
            timer = threading.Timer(limit_s, self._give_up, (client, limit_s))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()
        self._restarts.started()
        self._start_s = max(self._start_s or 0.0, time.monotonic() - began)
        self._fleet.waiting.retry_after_s = max(self._start_s, 1.0)

    def _give_up(self, client: ProcessClient, limit_s: float) -> None:
        logger.error(
            "a core hangs in its start: it does not serve after %.0f s, and the longest one before took %.1f s",
            limit_s,
            self._start_s,
        )
        client.abandon()

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _start_one(self, in_time: bool = False) -> Replica[ProcessClient]: ...

    @abstractmethod
    def _serve(self, *replicas: Replica[ProcessClient]) -> None: ...
