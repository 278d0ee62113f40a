"""From a listening socket and an engine to a server that answers, and its orderly end.

uvicorn waits for running requests without a limit, and knows nothing of the engine. Here a signal ends the server when
running requests have ended, or after `--shutdown-timeout`: then their clients get an error instead of a broken
connection. A dead core ends the process, so that whoever supervises it starts another.

Connections are accepted once the model is loaded: until then they are refused, which every supervisor takes for "not
ready". The port is bound before, so that a taken one is told at once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from engine import AsyncEngine
from engine.errors import ConfigError, CoreDiedError, EngineError
from entrypoints.server.app import create_app
from entrypoints.server.before_start import check_options
from entrypoints.server.connections import Connections, make_room, protocol_of
from entrypoints.server.context import ServerSettings
from entrypoints.server.prefixes import pin_file

logger = logging.getLogger("pageloom.server")

_TICK_S = 1.0
"""for the date in the headers; what is urgent wakes the server"""
_DRAIN_POLL_S = 0.05
_LAST_ERRORS_S = 0.25
"""after the engine has ended: for streams to end with an error, before what waits elsewhere is cancelled"""
_LAST_ANSWERS_S = 10.0
"""and for clients that are slow to take the end of their answers"""
_LEAVE_S = 1.0
"""after everything has ended, for threads that nobody waits for (a tokenizer's, an import's)"""


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


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server around one started engine."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, engine: AsyncEngine, grace_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._engine = engine
        self._grace_s = grace_s
        self._ending = False
        self._hurried = False
        """a second signal came: nothing is waited for"""
        self._woken = asyncio.Event()
        self._wake: Callable[[], object] = lambda: None
        self.death: CoreDiedError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        engine, ready, keeps_kv = self._engine, self._engine.ready, self._engine.model.facts.keeps_kv
        logger.info(
            "ready: %s serves %s; context %d tokens, %s, attention %s; started in %.1f s",
            ", ".join(url_of(s, "https" if self.config.is_ssl else "http") for s in sockets or ()),
            engine.served_name,
            engine.max_model_len,
            f"KV cache {ready.num_blocks} blocks of {ready.block_size} tokens"
            if keeps_kv
            else "an encoder: no KV cache",
            ready.attention_backend,
            ready.startup_seconds,
        )
        if engine.model.generates:
            params = engine.default_sampling_params()
            values = params.temperature, params.top_p, params.top_k
            logger.info("where a request names none: temperature %g, top_p %g, top_k %d", *values)

    async def main_loop(self) -> None:
        """uvicorn's wakes ten times a second; an idle server should hardly wake at all."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(self._woken.set)
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), _TICK_S)
            self._woken.clear()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._hurried = self.should_exit
        super().handle_exit(sig, frame)
        self._wake()

    @property
    def signalled(self) -> bool:
        return bool(self._captured_signals)

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
        running = self._engine.num_streams
        wait = f"; up to {self._grace_s:g} s for {running} running requests (again to end them now)" if running else ""
        logger.info("shutting down%s", wait)
        self._app.state.draining = True
        self._app.state.sockets.drain()
        end = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            if not self._ending:
                end.cancel()
            await asyncio.gather(end, return_exceptions=True)

    async def _end_requests(self) -> None:
        """Once none runs in the core, or in the end all the same. What has not reached it by then is not waited for."""
        deadline = time.monotonic() + self._grace_s
        while self._engine.num_streams and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._ending = True
        stop = asyncio.create_task(self._engine.shutdown())
        await asyncio.sleep(_LAST_ERRORS_S)
        self._app.state.unanswered.end()
        await stop


async def serve_engine(engine: AsyncEngine, listener: socket.socket, options: argparse.Namespace) -> int:
    """Start the engine, serve on `listener` until a signal or the core's death, shut the engine down. Returns the exit
    status. Of `options` it reads api_key, api_key_file, allowed_origins, root_path, ssl_certfile, ssl_keyfile,
    shutdown_timeout, pinned_prefixes, log_level and the fields of `ServerSettings`."""
    signals: list[int] = []
    try:
        api_key = check_options(options)
        with signals_abandon(engine, signals):
            await engine.start()
            if options.pinned_prefixes is not None:
                logger.info("%d prefixes are pinned", await pin_file(engine, options.pinned_prefixes))
        settings = ServerSettings(**{name: getattr(options, name) for name in ServerSettings.__struct_fields__})
        app = create_app(engine, engine.served_name, api_key, options.allowed_origins, settings)
        app.root_path = options.root_path.rstrip("/")
        server = Server(_uvicorns_config(app, engine, options), app, engine, options.shutdown_timeout)
        gc.collect()
        gc.freeze()  # what the start made stays: a collection between two tokens need not walk through it
        with _signals_are_uvicorns():
            await server.serve(sockets=[listener])
        status = 0 if server.started and server.death is None else 1
        if server.signalled:
            _leave_within(_LEAVE_S, status)
        return status
    except (asyncio.CancelledError, EngineError):
        if not signals:
            raise
        logger.info("ended by %s while starting", signal.Signals(signals[0]).name)
        return 128 + signals[0]
    finally:
        await engine.shutdown()


def _uvicorns_config(app: FastAPI, engine: AsyncEngine, options: argparse.Namespace) -> uvicorn.Config:
    limits = engine.config.limits
    connections, backlog = make_room(limits.connections)
    if connections < limits.connections:
        logger.warning(
            "%d connections instead of %d: the hard limit of open files (ulimit -Hn) allows no more",
            connections,
            limits.connections,
        )
    return uvicorn.Config(
        app,
        http=cast(Any, protocol_of(limits, Connections(connections))),
        ws="none",  # BoundedProtocol brings its own
        ws_max_size=limits.websocket_bytes,
        ws_per_message_deflate=False,
        backlog=backlog,
        server_header=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        log_config=None,
        log_level=options.log_level if options.log_level != "info" else "warning",
        access_log=options.log_level == "debug",
        timeout_keep_alive=cast(int, limits.keep_alive_s),
        timeout_graceful_shutdown=int(options.shutdown_timeout + _LAST_ANSWERS_S),
    )


@contextmanager
def signals_abandon(engine: AsyncEngine, signals: list[int]) -> Iterator[None]:
    """While the engine starts, SIGTERM and Ctrl-C are noted, kill the core and cancel this task. Threads may be
    importing or reading files meanwhile, and are not waited for."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def abandon(number: int, _: FrameType | None) -> None:
        signals.append(number)
        engine.abandon()
        _leave_within(_LEAVE_S, 128 + number)
        loop.call_soon_threadsafe(task.cancel)

    before = {number: signal.signal(number, abandon) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_within(seconds: float, status: int) -> None:
    """End the process with `status` if it has not ended by itself by then: an interpreter that exits waits for every
    thread, whatever that does. The core ends with its parent."""

    def leave() -> None:
        time.sleep(seconds)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)

    threading.Thread(target=leave, name="leave", daemon=True).start()


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
