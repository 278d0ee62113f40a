"""Cores that end on purpose, all of them, and start again: requests wait meanwhile (`engine.sleeping`)."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core.client import ProcessClient
from engine.core.sleeper import Sleeper
from engine.errors import ConfigError
from engine.replicas.fleet import Fleet
from engine.replicas.replica import Replica


class Sleeping(Sleeper):
    """Part of a `ReplicatedClient`."""

    _config: EngineConfig
    _fleet: Fleet[ProcessClient]
    _one_change: threading.RLock
    _changing: threading.RLock
    _following: set[threading.Thread]
    _in_rounds: bool
    _wake: int
    _asleep = False
    _wanted: int = 0
    """cores that serve, or are to: whoever follows one that died looks whether any is missing"""

    @property
    def is_sleeping(self) -> bool:
        return self._asleep

    def sleep(self) -> None:
        """Every core ends, and its memory is free. Requests that run, and those that come, wait for `wake_up`, and go
        on where they were. Idempotent. Raises `ConfigError` where nobody could go on with them."""
        if self._in_rounds or not self._config.core_restarts:
            raise ConfigError("sleep: requests survive no core here (core_restarts is 0, or replicas share experts)")
        with self._one_change, self._changing:
            self._check_open()
            if self._asleep:
                return
            self._asleep = True
            self._fleet.rest(True)
            replicas = self._fleet.replicas
            self._take_away(replicas)
            self._following.clear()  # they find that nobody is missing, or that all sleep
            for replica in replicas:
                replica.client.close()
            self._fleet.tell()
            os.eventfd_write(self._wake, 1)

    def wake_up(self, config: EngineConfig | None = None) -> None:
        """As many cores start as there were. As `Sleeper.wake_up`."""
        with self._one_change, self._changing:
            self._check_open()
            if not self._asleep:
                return
            before, self._config = self._config, config or self._config
            try:
                replicas = self._start_many(self._wanted)
            except BaseException:
                self._config = before
                raise
            self._asleep = False
            self._fleet.rest(False)
            if config is not None:
                self._fleet.forgive()
            self._serve(*replicas)
            self._fleet.tell()
            os.eventfd_write(self._wake, 1)

    def change(self, config: EngineConfig) -> None:
        """And nobody else puts it to sleep or wakes it up meanwhile."""
        with self._one_change, self._changing:
            super().change(config)

    @abstractmethod
    def _check_open(self) -> None: ...

    @abstractmethod
    def _take_away(self, replicas: Sequence[Replica[ProcessClient]]) -> None: ...

    @abstractmethod
    def _start_many(self, size: int) -> list[Replica[ProcessClient]]: ...

    @abstractmethod
    def _serve(self, *replicas: Replica[ProcessClient]) -> None: ...
