"""From a listening socket and an engine to a server that answers, and its orderly end.

uvicorn waits for running requests without a limit, and knows nothing of the engine. Here a signal ends running
requests (after `--shutdown-timeout`): their clients get an error instead of a broken connection. A dead core ends the
process, so that whoever supervises it starts another.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from engine import AsyncEngine
from engine.errors import ConfigError, CoreDiedError
from entrypoints.server.app import create_app
from entrypoints.server.prefixes import pin_file

logger = logging.getLogger("pageloom.server")

_TICK_S = 1.0
"""for the date in the headers; what is urgent wakes the server"""
_LAST_ANSWERS_S = 10.0
"""after the engine has ended: for clients that are slow to take the end of their answers"""


def listen(host: str, port: int) -> socket.socket:
    """Bound, not yet accepting. Raises `ConfigError` where that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named: without it, tokens wait for ACKs.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --port or --host") from error
    return listener


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """As `asyncio.run`, on uvloop: a streamed token costs the front end about half as much."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server around one started engine."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, grace_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._grace_s = grace_s
        self._ending = False
        self._woken = asyncio.Event()
        self._wake: Callable[[], object] = lambda: None
        self.death: CoreDiedError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        engine, ready = self._engine, self._engine.ready
        logger.info(
            "ready: %s serves %s; context %d tokens, KV cache %d blocks of %d tokens, attention %s; started in %.1f s",
            ", ".join(url_of(s) for s in sockets or ()),
            engine.served_name,
            engine.max_model_len,
            ready.num_blocks,
            ready.block_size,
            ready.attention_backend,
            ready.startup_seconds,
        )

    async def main_loop(self) -> None:
        """uvicorn's wakes ten times a second; an idle server should hardly wake at all."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(self._woken.set)
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _TICK_S)
            self._woken.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()

    async def on_tick(self, counter: int) -> bool:
        """Looks after signals, the core and the date in the headers; true ends the server."""
        try:
            self._engine.check_health()
        except CoreDiedError as error:
            if not self._ending and self.death is None:
                self.death = error
                logger.error("the engine core died; the server ends: %s", error)
        return await super().on_tick(counter) or self.death is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("shutting down")
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            if not self._ending:
                end.cancel()
            await asyncio.gather(end, return_exceptions=True)

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._grace_s)
        self._ending = True
        await self._engine.shutdown()


async def serve_engine(engine: AsyncEngine, listener: socket.socket, options: argparse.Namespace) -> int:
    """Start the engine, serve on `listener` until a signal or the core's death, shut the engine down. Returns the exit
    status. Of `options` it reads api_key, allowed_origins, shutdown_timeout, pinned_prefixes and log_level."""
    try:
        with _sigterm_cancels():
            await engine.start()
            if options.pinned_prefixes is not None:
                logger.info("%d prefixes are pinned", await pin_file(engine, options.pinned_prefixes))
        config = uvicorn.Config(
            create_app(engine, engine.served_name, options.api_key, options.allowed_origins),
            http="httptools",
            log_config=None,
            log_level=options.log_level if options.log_level != "info" else "warning",
            access_log=options.log_level == "debug",
            timeout_keep_alive=60,
            timeout_graceful_shutdown=int(options.shutdown_timeout + _LAST_ANSWERS_S),
        )
        server = Server(config, engine, options.shutdown_timeout)
        with _signals_are_uvicorns():
            await server.serve(sockets=[listener])
        return 0 if server.started and server.death is None else 1
    finally:
        await engine.shutdown()


@contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """While the engine starts, SIGTERM cancels this task, so that the core is taken down in order."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def _signals_are_uvicorns() -> Iterator[None]:
    """uvicorn raises the signals that ended it once more when it has ended: by then they are served."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
