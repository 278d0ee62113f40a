"""Profiles of an engine that serves: which files are written, and that whoever asks learns when they are there."""

from __future__ import annotations

import asyncio
import time
from os import PathLike
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from engine.core.client import InProcessClient
from engine.core.wire import StartProfile, StopProfile
from engine.errors import ConfigError, EngineError, InvalidRequestError
from engine.replicas.client import ReplicatedClient
from engine.sleeping import is_sleeping

if TYPE_CHECKING:
    from engine.session import Session

_POLL_S = 0.02
_PATIENCE_S = 600.0
"""a long profile takes a while to be written"""


class Profiles:
    """Of one engine; one at a time. It ends with the core that it is of, and is written then, if that was in peace."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._path: Path | None = None
        self._one_by_one = asyncio.Lock()

    def start(self, directory: str | PathLike[str], steps: int | None) -> None:
        """For whoever turns the engine himself. Raises as `start_async`."""
        order = self._begin(directory, steps)
        self._turn(order)
        self._begun(order)

    def stop(self) -> list[Path]:
        """As `stop_async`."""
        self._check_begun()
        if not is_sleeping(self._session.client):
            self._turn(StopProfile())
        return self._files()

    async def start_async(self, directory: str | PathLike[str], steps: int | None) -> Path:
        """What the names of the files begin with. `steps`: None: as many as the limit. Raises `ConfigError` while one
        runs, no core does, or the directory cannot be written, `InvalidRequestError` for such a number of steps."""
        async with self._one_by_one:
            order = await asyncio.to_thread(self._begin, directory, steps)
            await self._wait(order)
            return self._begun(order)

    async def stop_async(self) -> list[Path]:
        """The files of the last one, which ends now, or has ended by itself. Raises `ConfigError` where there are
        none."""
        async with self._one_by_one:
            self._check_begun()
            if not is_sleeping(self._session.client) and self._cores:
                await self._wait(StopProfile())
            return self._files()

    def _begin(self, directory: str | PathLike[str], steps: int | None) -> StartProfile:
        session, limits = self._session, self._session.config.limits
        if steps is not None and (type(steps) is not int or steps < 1):
            raise InvalidRequestError(f"num_steps must be a whole number of at least 1, got {steps!r}", "num_steps")
        limits.check("profile_steps", steps or 0, "num_steps")
        if is_sleeping(session.client):
            raise ConfigError("the engine sleeps: wake it up first")
        if session.metrics.stats.profiling:
            raise ConfigError("a profile runs already: stop it first")
        if not self._cores:
            raise ConfigError("no core serves now: one died, and another one is being started")
        folder = Path(directory).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(f"profiles cannot be written to {folder}: {error.strerror}") from error
        name = time.strftime("profile-%Y%m%d-%H%M%S")
        path, again = folder / name, 0
        while path == self._path or any(folder.glob(f"{path.name}-*")):  # a second within a second
            again += 1
            path = folder / f"{name}.{again}"
        return StartProfile(path=str(path), steps=steps or limits.profile_steps)

    def _begun(self, order: StartProfile) -> Path:
        path = Path(order.path)
        if not self._session.metrics.stats.profiling and not any(path.parent.glob(f"{path.name}-*")):
            raise ConfigError("no profile was begun: the log says why")
        self._path = path
        return path

    @property
    def _cores(self) -> int:
        client = self._session.client
        return len(client.replicas) if isinstance(client, ReplicatedClient) else 1

    def _check_begun(self) -> None:
        if self._path is None:
            raise ConfigError("no profile was begun")

    def _files(self) -> list[Path]:
        assert self._path is not None
        files = sorted(self._path.parent.glob(f"{self._path.name}-*")) if self._path.parent.is_dir() else []
        if not files:
            raise ConfigError("the profile was not written: its core died before, or the log says why")
        return files

    def _turn(self, order: StartProfile | StopProfile) -> None:
        orders, client = self._send(order), self._session.client
        while self._session.metrics.stats.profile_orders < orders:
            if isinstance(client, InProcessClient) and not client.has_work:
                time.sleep(_POLL_S)  # the thread that computes carries it out
            else:
                self._session.take_in(client.recv())

    async def _wait(self, order: StartProfile | StopProfile) -> None:
        cores, orders, until = self._cores, self._send(order), time.monotonic() + _PATIENCE_S
        while self._session.metrics.stats.profile_orders < orders and self._cores >= cores:
            self._session.check_alive()
            if time.monotonic() > until:
                raise EngineError(f"the core has not answered for {_PATIENCE_S:g} s")
            await asyncio.sleep(_POLL_S)

    def _send(self, order: StartProfile | StopProfile) -> int:
        """How many orders cores will have taken then."""
        orders = self._session.metrics.stats.profile_orders + self._cores
        self._session.client.send(order)
        return orders
