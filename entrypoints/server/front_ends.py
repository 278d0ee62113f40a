"""Several processes take requests, on the same port, before one fleet of cores (`--api-server-count`).

This one has the cores and their hub (`engine.front_ends`), and no door of its own. It starts the others, passes signals
on to them, and ends when they have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

from engine.child import process_age_s
from engine.config import EngineConfig
from engine.core.client import CoreClient
from engine.core.supervision import SocketDirectory
from engine.core.wire import CoreReady
from engine.errors import EngineError
from engine.front_ends.hub import Hub
from engine.front_ends.wire import FrontEndStart
from engine.launched import leave_unless_first
from engine.observability.logs import child_mark
from engine.plan import resolve_with_plan
from engine.replicas.choice import process_client
from entrypoints.options import engine_args
from entrypoints.server.api_key import VARIABLE, take_api_key
from entrypoints.server.before_start import check_options
from entrypoints.server.counts import SharedMemory
from entrypoints.server.ending import url_of
from entrypoints.server.front_end import Begin
from entrypoints.server.front_end_processes import FrontEnds, listeners
from entrypoints.server.responses_api.store import ResponseStore
from entrypoints.server.run import pass_over_hangups, signals_abandon
from entrypoints.server.supervisor import Supervisor

logger = logging.getLogger("pageloom.server")

_TICK_S = 1.0


async def serve_front_ends(options: argparse.Namespace) -> int:
    """As `serve_engine`."""
    signals: list[int] = []
    api_key = _take_key(options)
    check_options(options)
    supervisor = Supervisor(os.environ, os.getpid())
    passes_hangups = pass_over_hangups(options, supervisor)
    args = engine_args(options, options.model)
    with listeners(options.host, options.port, options.uds, options.api_server_count) as sockets:
        try:
            with signals_abandon(lambda: None, signals):
                await asyncio.to_thread(leave_unless_first, args)
                _, config = await asyncio.to_thread(resolve_with_plan, args)
        except (asyncio.CancelledError, EngineError):
            if not signals:
                raise
            logger.info("ended by %s while starting", signal.Signals(signals[0]).name)
            return 128 + signals[0]
        directory, quotas = SocketDirectory(), SharedMemory.create()
        try:
            client = process_client(config)
            hub = Hub(config, client, directory)
            begin = _begin(config, directory, quotas, options, api_key)

            def forget(place: int) -> None:
                if options.keys is not None:
                    SharedMemory(quotas, place).close()

            front_ends = FrontEnds(hub, directory, sockets, begin, forget)
            server = _Server(front_ends, hub, client, supervisor, passes_hangups)
            return await server.run(url_of(sockets[0], "http" if options.ssl_certfile is None else "https"))
        finally:
            directory.remove()
            os.close(quotas)


def _take_key(options: argparse.Namespace) -> str | None:
    """As `take_keys` finds it, and so that it does."""
    key = take_api_key(options.api_key, options.api_key_file)
    options.api_key = options.api_key_file = None
    if key is not None:
        os.environ[VARIABLE] = key
    return key


def _begin(
    config: EngineConfig,
    directory: SocketDirectory,
    quotas: int,
    options: argparse.Namespace,
    api_key: str | None,
) -> Begin:
    """What all are told. Raises `ConfigError` for a store that is none, once and not once for each."""
    store, limits = options.response_store or Path(directory.path) / "responses", config.limits
    ResponseStore(store, limits.stored_responses_bytes, limits.stored_responses_s, shared=True).close()
    return Begin(
        start=FrontEndStart(number=0, config=config, parent_pid=0, to_hub="", from_hub="", directory=""),
        given=options.given,
        listener_fd=0,
        quotas_fd=quotas,
        place=0,
        api_key=api_key,
        response_store=str(store),
        log_level=logging.getLogger().getEffectiveLevel(),
        log_mark=child_mark(),
    )


class _Server:
    def __init__(
        self, front_ends: FrontEnds, hub: Hub, client: CoreClient, supervisor: Supervisor, passes_hangups: bool
    ) -> None:
        """`client` is closed in the end."""
        self._front_ends, self._hub, self._client = front_ends, hub, client
        self._supervisor, self._passes_hangups = supervisor, passes_hangups
        self._signals: list[int] = []
        self._death: EngineError | None = None
        self._ready: CoreReady | None = None

    async def run(self, url: str) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end, number)
        if self._passes_hangups:
            loop.add_signal_handler(signal.SIGHUP, self._front_ends.look_again)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is closed
            loop.add_signal_handler(signal.SIGHUP, self._end, signal.SIGHUP)
        starting = loop.run_in_executor(None, self._client.start)
        running = asyncio.create_task(self._front_ends.run())
        passing, telling = asyncio.create_task(self._pass_on(starting)), asyncio.create_task(self._tell(url))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_TICK_S)
                if self._supervisor.watches:
                    self._supervisor.alive()
        finally:
            for task in (telling, passing):
                task.cancel()
            if not starting.done():
                self._client.abandon()
            await asyncio.gather(telling, passing, starting, return_exceptions=True)
            await asyncio.to_thread(self._client.close)
            self._hub.close()
        running.result()
        return self._status()

    def _status(self) -> int:
        if self._signals and self._ready is None:
            return 128 + self._signals[0]
        if self._death is not None:
            raise self._death
        if self._front_ends.failed is not None:
            raise EngineError(self._front_ends.failed)
        return int(self._front_ends.went_wrong)

    def _end(self, number: int) -> None:
        self._signals.append(number)
        self._supervisor.stopping()
        if self._ready is None:
            logger.info("ended by %s while starting", signal.Signals(number).name)
            self._client.abandon()
        self._front_ends.end()

    async def _pass_on(self, starting: asyncio.Future[CoreReady]) -> None:
        """What front ends and cores say to each other, once cores serve and until none does."""
        try:
            self._ready = await asyncio.shield(starting)
            self._death = await self._hub.run(self._ready)
        except EngineError as error:
            self._death = error
        except Exception as error:
            logger.exception("what passes requests on to the cores failed")
            self._death = EngineError(f"what passes requests on to the cores failed: {error!r}")
            self._front_ends.end()
        self._front_ends.cores_are_gone()

    async def _tell(self, url: str) -> None:
        await self._front_ends.all_serve.wait()
        name = self._front_ends.served_name
        count, age_s = self._front_ends.count, process_age_s()
        logger.info("ready: %s serves %s through %d API servers; started in %.1f s", url, name, count, age_s)
        self._supervisor.ready(f"serves {name}")
