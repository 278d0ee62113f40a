"""From a listening socket and an engine to a server that answers, and its end. A dead core ends the process, so that
whoever supervises it starts another.

Connections are accepted once the model is loaded: until then they are refused, which every supervisor takes for "not
ready". The port is bound before, so that a taken one is told at once.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
import uvloop
from fastapi import FastAPI

from engine import AsyncEngine
from engine.child import process_age_s
from engine.errors import ConfigError, CoreDiedError, EngineError
from engine.front_ends.client import FrontEndClient
from entrypoints.server.app import create_app
from entrypoints.server.before_start import check_options
from entrypoints.server.certificate import Certificate
from entrypoints.server.connections import Connections, make_room, protocol_of
from entrypoints.server.context import ServerSettings
from entrypoints.server.counts import SharedMemory
from entrypoints.server.ending import LAST_ERRORS_S, EndingServer, signals_are_uvicorns, url_of
from entrypoints.server.keys import Keyring
from entrypoints.server.prefixes import pin_file
from entrypoints.server.supervisor import Supervisor

logger = logging.getLogger("pageloom.server")

_LEAVE_S = 1.0
"""after everything has ended, for threads that nobody waits for (a tokenizer's, an import's)"""


def listen(host: str, port: int, shared: bool = False) -> socket.socket:
    """Bound, not yet accepting. `shared`: with other sockets of this user that are, too; the kernel divides connections
    among them. Raises `ConfigError` where that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named: without it, tokens wait for ACKs.
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --port or --host") from error
    return listener


def listen_at(path: Path) -> socket.socket:
    """A Unix socket, bound, not yet accepting. One that a server has left behind is taken. Raises `ConfigError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and not path.is_socket():
            raise ConfigError(f"--uds: {path} is there already, and no socket")
        if path.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                if other.connect_ex(str(path)) == 0:
                    raise ConfigError(f"--uds: another server listens at {path}")
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen at {path}: {error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


@contextmanager
def listening(host: str, port: int, path: Path | None) -> Iterator[socket.socket]:
    """At the Unix socket `path`, or else at a host and a port. Raises `ConfigError`."""
    if path is None:
        with listen(host, port) as listener:
            yield listener
        return
    with _alone_at(path), listen_at(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _alone_at(path: Path) -> Iterator[None]:
    """Also while a server loads, and answers nobody yet. The kernel drops the lock with its holder."""
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(path.with_name(path.name + ".lock"), "a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--uds: another server has {path}") from None
        except OSError as error:
            raise ConfigError(f"--uds: cannot lock {path}.lock: {error}") from error
        yield


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """As `asyncio.run`, on uvloop: a streamed token costs the front end about half as much."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class Watched(Protocol):
    def look_again(self, now: float, anyway: bool = False) -> None: ...


class Server(EndingServer):
    """Around one started engine."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        engine: AsyncEngine,
        grace_s: float,
        notice_s: float,
        watched: Sequence[Watched],
        supervisor: Supervisor,
    ) -> None:
        """`watched`: files that are read again when they change, and on SIGHUP."""
        super().__init__(config, grace_s, notice_s)
        self._watched = watched
        self._supervisor = supervisor
        self._app = app
        self._engine = engine
        self.death: CoreDiedError | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        supervised = bool(self._watched) or self._supervisor.is_there  # else it is a terminal that is closed
        if threading.current_thread() is not threading.main_thread() or (ignored and not supervised):
            await super().serve(sockets)
            return
        loop = asyncio.get_running_loop()
        if supervised:
            loop.add_signal_handler(signal.SIGHUP, self._look_again, True)
        else:
            loop.add_signal_handler(signal.SIGHUP, self.handle_exit, signal.SIGHUP, None)
        try:
            await super().serve(sockets)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)

    def _look_again(self, anyway: bool = False) -> None:
        for each in self._watched:
            each.look_again(time.monotonic(), anyway)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        engine, ready, keeps_kv = self._engine, self._engine.ready, self._engine.model.facts.keeps_kv
        logger.info(
            "ready: %s serves %s; context %d tokens, %s, attention %s; started in %.1f s, of which its core took %.1f",
            ", ".join(url_of(s, "https" if self.config.is_ssl else "http") for s in sockets or ()),
            engine.served_name,
            engine.max_model_len,
            f"KV cache {ready.num_blocks} blocks of {ready.block_size} tokens"
            if keeps_kv
            else "an encoder: no KV cache",
            ready.attention_backend,
            process_age_s(),
            ready.startup_seconds,
        )
        self._supervisor.ready(f"serves {engine.served_name}")
        if engine.model.generates:
            params = engine.default_sampling_params()
            values = params.temperature, params.top_p, params.top_k
            logger.info("where a request names none: temperature %g, top_p %g, top_k %d", *values)
        elif engine.model.head is None:
            logger.info(
                "where a request names none: embeddings are of pooling type %s", engine.model.pooling.pooling_type
            )

    @property
    def num_running(self) -> int:
        return 0 if self._engine.is_sleeping else self._engine.num_streams  # those wait, and nobody wakes it up now

    async def on_tick(self, counter: int) -> bool:
        """Looks after signals, the core, files, who supervises, and the date in the headers; true ends the server."""
        self._look_again()
        if self._supervisor.watches:  # of cores that hang the engine takes care
            self._supervisor.alive()
        try:
            self._engine.check_health()
        except CoreDiedError as error:
            if not self._ending and self.death is None:
                self.death = error
                logger.error("the engine core died; the server ends: %s", error)
        return await super().on_tick(counter) or self.death is not None

    @property
    def can_answer(self) -> bool:
        return self.death is None

    def announce_end(self) -> None:
        self._app.state.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._supervisor.stopping()
        self._app.state.draining = True
        self._app.state.sockets.drain()
        await super().shutdown(sockets)

    async def end_running(self) -> None:
        """What has not reached the core by then is not waited for."""
        stop = asyncio.create_task(self._engine.shutdown())
        await asyncio.sleep(LAST_ERRORS_S)
        self._app.state.unanswered.end()
        await stop


async def serve_engine(
    engine: AsyncEngine,
    listener: socket.socket,
    options: argparse.Namespace,
    supervisor: Supervisor | None = None,
    siblings: FrontEndClient | None = None,
    memory: SharedMemory | None = None,
) -> int:
    """Start the engine, serve on `listener` until a signal or the core's death, shut the engine down. Returns the exit
    status. Of `options` it reads api_key, api_key_file, keys, allowed_origins, root_path, ssl_certfile, ssl_keyfile,
    shutdown_timeout, drain_delay, pinned_prefixes, log_level and the fields of `ServerSettings`. `supervisor`: another
    than the environment says; `siblings`: as `create_app`'s; `memory`: as `Keyring`'s."""
    signals: list[int] = []
    supervisor = supervisor or Supervisor(os.environ, os.getpid())
    try:
        keyring = check_options(options, memory)
        pass_over_hangups(options, supervisor)
        with signals_abandon(engine.abandon, signals):
            await engine.start()
            if options.pinned_prefixes is not None:
                logger.info("%d prefixes are pinned", await pin_file(engine, options.pinned_prefixes))
        settings = ServerSettings(**{name: getattr(options, name) for name in ServerSettings.__struct_fields__})
        app = create_app(engine, engine.served_name, keyring, options.allowed_origins, settings, siblings)
        await app.state.adapters.load_all(settings.lora_modules)
        app.root_path = f"/{path}" if (path := options.root_path.strip("/")) else ""
        config = _uvicorns_config(app, engine, options)
        waits = options.shutdown_timeout, options.drain_delay
        server = Server(config, app, engine, *waits, _watched(config, options, keyring), supervisor)
        gc.collect()
        gc.freeze()  # what the start made stays: a collection between two tokens need not walk through it
        with signals_are_uvicorns():
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
    wanted = max(limits.connections // options.api_server_count, 1)
    connections, backlog = make_room(wanted)
    if connections < wanted:
        logger.warning(
            "%d connections instead of %d: the hard limit of open files (ulimit -Hn) allows no more",
            connections,
            wanted,
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
    )


def _watched(config: uvicorn.Config, options: argparse.Namespace, keyring: Keyring | None) -> list[Watched]:
    watched: list[Watched] = [] if keyring is None or not keyring.is_read_again else [keyring]
    config.load()
    if config.ssl is not None:
        watched.append(Certificate(config.ssl, options.ssl_certfile, options.ssl_keyfile))
    return watched


def pass_over_hangups(options: argparse.Namespace, supervisor: Supervisor) -> bool:
    """Until the server runs: a SIGHUP asks for files to be read again, where there are such files or somebody
    supervises; while it starts they have been read just now. Returns whether that is so."""
    means_files = options.keys is not None or options.ssl_certfile is not None
    supervised = means_files or supervisor.is_there
    if supervised and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return supervised


@contextmanager
def signals_abandon(abandon_core: Callable[[], None], signals: list[int]) -> Iterator[None]:
    """While the engine starts, SIGTERM and Ctrl-C are noted, kill the core and cancel this task. Threads may be
    importing or reading files meanwhile, and are not waited for."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def abandon(number: int, _: FrameType | None) -> None:
        signals.append(number)
        abandon_core()
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
