"""One of several processes that take requests (`--api-server-count`): `front_ends` starts it, with a `Begin` as one
line of JSON on stdin. It ends with whoever has started it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from engine.child import name_process
from engine.core.process import write_log
from engine.front_ends.wire import FrontEndStart
from entrypoints.server.caller import caller_id
from entrypoints.server.supervisor import Supervisor
from entrypoints.sources import Given

if TYPE_CHECKING:
    from engine.config import EngineArgs, EngineConfig
    from engine.front_ends.client import FrontEndClient
    from engine.models.description import ModelDescription

NAME = "API server {}"
"""in the log"""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    start: FrontEndStart
    given: Given
    """as whoever starts this process has read it: files may say something else by now"""
    listener_fd: int
    quotas_fd: int
    place: int
    """among those that take requests now: that of one that has died is the next one's"""
    api_key: str | None
    """wherever it was found"""
    response_store: str
    log_level: int
    log_mark: str


class _Parent(Supervisor):
    """Whoever has started this process listens where a supervisor would, and passes its signals on."""

    is_there = True
    watches = False

    def __init__(self, client: FrontEndClient) -> None:
        super().__init__({}, os.getpid())
        self._client = client

    def ready(self, status: str) -> None:
        self._client.serves()


def main() -> NoReturn:
    begin = msgspec.json.decode(sys.stdin.buffer.readline(), type=Begin)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    name_process(f"pageloom api {begin.start.number}")
    write_log(NAME.format(begin.start.number), begin.log_level, begin.log_mark, caller_id)
    raise SystemExit(_run(begin))


def _run(begin: Begin) -> int:
    import asyncio

    from engine.errors import EngineError
    from entrypoints.serve import build_parser, quiet_libraries
    from entrypoints.server.api_key import VARIABLE
    from entrypoints.server.run import logger, run_loop
    from entrypoints.sources import parse_again

    quiet_libraries()
    options = parse_again(build_parser(), begin.given)
    options.response_store = Path(begin.response_store)
    options.api_key = options.api_key_file = None
    if begin.api_key is not None:
        os.environ[VARIABLE] = begin.api_key  # whoever takes it removes it, too
    try:
        return run_loop(_serve(options, begin))
    except EngineError as error:
        logger.critical("%s", error)
        return 1
    except asyncio.CancelledError:  # SIGTERM while starting
        return 143


async def _serve(options: Any, begin: Begin) -> int:
    from engine import AsyncEngine
    from engine.front_ends.client import FrontEndClient
    from engine.resolve import resolve_here
    from entrypoints.options import engine_args
    from entrypoints.server.counts import SharedMemory
    from entrypoints.server.run import serve_engine

    client = FrontEndClient(begin.start)

    def resolve(args: EngineArgs) -> tuple[ModelDescription, EngineConfig]:
        return resolve_here(args, warns=False)[0], client.config

    engine = AsyncEngine(engine_args(options, options.model), client_factory=lambda _: client, resolve=resolve)
    with socket.socket(fileno=begin.listener_fd) as listener:
        memory = None if options.keys is None else SharedMemory(begin.quotas_fd, begin.place)
        return await serve_engine(engine, listener, options, _Parent(client), client, memory)
