"""Profiles of an engine that serves: which files are written, and that whoever asks learns when they are there."""

from __future__ import annotations

import asyncio
import time
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.wire import StartProfile, StopProfile
from engine.errors import ConfigError, EngineError
from engine.sleeping import is_sleeping

if TYPE_CHECKING:
    from engine.session import Session

_POLL_S = 0.02
_PATIENCE_S = 120.0
"""a long profile takes a while to be written"""


class Profiles:
    """Of one engine; one at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._path: Path | None = None

    def start(self, directory: str | PathLike[str], steps: int | None) -> None:
        """For whoever turns the engine himself. Raises as `start_async`."""
        self._turn(self._begin(directory, steps))

    def stop(self) -> list[Path]:
        self._turn(self._end())
        return self._files()

    async def start_async(self, directory: str | PathLike[str], steps: int | None) -> Path:
        """What the names of the files begin with. `steps`: None: as many as the limit. Raises `ConfigError` while one
        runs or where the directory cannot be written, `InvalidRequestError` for more steps than the limit."""
        order = self._begin(directory, steps)
        await self._wait(order)
        return Path(order.path)

    async def stop_async(self) -> list[Path]:
        """The files of the last one, which ends now, or has ended by itself. Raises `ConfigError` where there was none,
        `EngineError` where they could not be written."""
        await self._wait(self._end())
        return self._files()

    def _begin(self, directory: str | PathLike[str], steps: int | None) -> StartProfile:
        session, limits = self._session, self._session.config.limits
        if session.metrics.stats.profiling:
            raise ConfigError("a profile runs already: stop it first")
        limits.check("profile_steps", steps or 0, "num_steps")
        folder = Path(directory).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profiles cannot be written to {folder}: {error.strerror}") from error
        name = time.strftime("profile-%Y%m%d-%H%M%S")
        path, again = folder / name, 0
        while any(folder.glob(f"{path.name}-*")):  # a second within a second
            again += 1
            path = folder / f"{name}.{again}"
        self._path = path
        return StartProfile(path=str(path), steps=steps or limits.profile_steps)

    def _end(self) -> StopProfile:
        if self._path is None:
            raise ConfigError("no profile was begun")
        return StopProfile()

    def _files(self) -> list[Path]:
        assert self._path is not None
        files = sorted(self._path.parent.glob(f"{self._path.name}-*"))
        if not files:
            raise EngineError("the profile was not written: the log says why")
        return files

    def _turn(self, order: StartProfile | StopProfile) -> None:
        orders = self._send(order)
        while self._session.metrics.stats.profile_orders < orders:
            self._session.take_in(self._session.client.recv())

    async def _wait(self, order: StartProfile | StopProfile) -> None:
        orders, until = self._send(order), time.monotonic() + _PATIENCE_S
        while self._session.metrics.stats.profile_orders < orders:
            self._session.check_alive()
            if time.monotonic() > until:
                raise EngineError(f"the core has not answered for {_PATIENCE_S:g} s")
            await asyncio.sleep(_POLL_S)

    def _send(self, order: StartProfile | StopProfile) -> int:
        """How many orders cores will have taken then."""
        session = self._session
        if is_sleeping(session.client):
            raise ConfigError("the engine sleeps: wake it up first")
        stats = session.metrics.stats
        session.client.send(order)
        return stats.profile_orders + stats.replicas
