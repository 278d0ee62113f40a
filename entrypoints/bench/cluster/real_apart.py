"""The same traffic on prefill and decode servers behind the router: processes of this machine, asked over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import httpx
from tqdm import tqdm

from engine.config import EngineArgs
from engine.core.wire import CoreStats
from engine.errors import EngineError
from entrypoints.bench.cluster.apart import apart_args
from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.outcome import Outcome, Served, outcome_of
from entrypoints.bench.cluster.simulate import loads_and_hits
from entrypoints.bench.cluster.traffic import Arrival
from entrypoints.bench.http_load import LoadClient, wait_compiled
from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest

_START_S = 300.0
_LOOK_S = 0.1
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_hits")
"""that servers tell: of `CoreStats` prompt_tokens, generated_tokens and prefix_hit_tokens"""


def run_really_apart(
    args: EngineArgs, model: str, layout: Layout, arrivals: Sequence[Arrival], warm_up: Sequence[Arrival]
) -> Outcome:
    """Latencies are those of an HTTP client. `model`: as it is served. `warm_up`: sent before. Raises EngineError for a
    server that does not start and a request that fails."""
    prefill, decode = apart_args(args)
    with ExitStack() as running:
        computing = [running.enter_context(_server(serve_model, prefill)) for _ in range(layout.prefill)]
        decoding = [running.enter_context(_server(serve_model, decode)) for _ in range(layout.replicas)]
        urls = [_ready(each) for each in (*computing, *decoding)]
        router = _ready(running.enter_context(_server(serve_router, urls[: layout.prefill], urls[layout.prefill :])))
        asyncio.run(_send(router, model, warm_up))
        before = [_counters(url) for url in urls]
        records = asyncio.run(_send(router, model, arrivals))
        stats = [_since(old, _counters(url)) for old, url in zip(before, urls, strict=True)]
    served = [
        Served(each.submitted, each.first_token or each.finished, each.finished, each.output_tokens) for each in records
    ]
    return outcome_of(served, loads_and_hits(stats)[0], loads_and_hits(stats[: layout.prefill])[1])


async def _send(url: str, model: str, arrivals: Sequence[Arrival]) -> list[Record]:
    requests = [BenchRequest(each.message.prompt_token_ids, each.message.max_tokens, each.at_s) for each in arrivals]
    options = argparse.Namespace(base_url=url, extra_body={}, api_key=None, max_concurrency=None)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        records = await LoadClient(options, model).records(client, requests, tqdm(disable=True))
    for record in records:
        if record.error is not None:
            raise EngineError(f"a request failed: {record.error}")
    return records


# -- processes -------------------------------------------------------------------------------------------------------


def serve_model(args: EngineArgs, told: Connection) -> None:
    """As `engine-serve` does."""
    from engine import AsyncEngine
    from entrypoints.serve import build_parser
    from entrypoints.server.run import listen, run_loop, serve_engine

    with listen("127.0.0.1", 0) as listener:
        told.send(listener.getsockname()[1])
        options = build_parser().parse_args(["--log-level", "error", "--shutdown-timeout", "0"])
        raise SystemExit(run_loop(serve_engine(AsyncEngine(args), listener, options)))


def serve_router(prefill: list[str], decode: list[str], told: Connection) -> None:
    """As `engine-serve --role router` does."""
    from entrypoints.router import run
    from entrypoints.serve import build_parser
    from entrypoints.server.run import listen, run_loop

    with listen("127.0.0.1", 0) as listener:
        told.send(listener.getsockname()[1])
        roles = ["--role", "router", "--prefill", *prefill, "--decode", *decode]
        raise SystemExit(run_loop(run.serve_router(build_parser().parse_args(roles), listener)))


class _Server:
    def __init__(self, process: multiprocessing.process.BaseProcess, told: Connection) -> None:
        self.process, self.told = process, told


@contextmanager
def _server(serve: Callable[..., None], *given: object) -> Iterator[_Server]:
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe()
    process = context.Process(target=serve, args=(*given, tells))
    process.start()
    tells.close()
    try:
        yield _Server(process, told)
    finally:
        process.terminate()
        process.join()
        told.close()


def _ready(server: _Server) -> str:
    """Its address, once it answers and nothing is compiled any more."""
    deadline = time.monotonic() + _START_S
    try:
        url = f"http://127.0.0.1:{server.told.recv()}"
    except EOFError:
        raise EngineError(f"a server did not start: exit status {server.process.exitcode}") from None
    while time.monotonic() < deadline and server.process.is_alive():
        try:
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200:
                wait_compiled(argparse.Namespace(base_url=url, api_key=None))
                return url
        except httpx.HTTPError:
            pass
        time.sleep(_LOOK_S)
    raise EngineError(f"a server is not ready: exit status {server.process.exitcode}, after at most {_START_S:g} s")


def _counters(url: str) -> list[int]:
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    found = [
        re.search(rf"^pageloom_{name}_total(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE) for name in _COUNTERS
    ]
    return [int(float(each[1])) if each else 0 for each in found]


def _since(before: list[int], now: list[int]) -> CoreStats:
    prompts, generated, hits = (new - old for old, new in zip(before, now, strict=True))
    return CoreStats(prompt_tokens=prompts, generated_tokens=generated, prefix_hit_tokens=hits)
