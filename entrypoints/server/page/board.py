"""`GET /v1/board`: one look at everything that the board shows, to be asked for once a second."""

from __future__ import annotations

import time
from importlib.metadata import version

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from engine import AsyncEngine
from engine.core.wire import CoreStats
from engine.observability.metrics import Distribution
from entrypoints.server.context import ServerContext
from entrypoints.server.encoding import json_response


class BoardEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the server runs."""

    model: str
    version: str
    device: str
    dtype: str
    kv_cache_dtype: str
    quantization: str | None
    attention_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    block_size: int
    """tokens"""
    num_blocks: int
    speculation: str | None


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and distributions are since the start: rates and quantiles of a while are differences of two looks."""

    object: str = "board"
    at_s: float
    """seconds on a clock of the server's that only goes forward"""
    engine: BoardEngine
    stats: CoreStats
    """as of the latest step"""
    ended: dict[str, int]
    """sequences, by the reason of their end"""
    first_token_s: Distribution
    """seconds from a request's arrival to its first token, of ended requests"""
    per_token_s: Distribution
    """seconds between a request's tokens after its first, the mean of each ended request"""
    latency_s: Distribution
    """seconds from a request's arrival to its end"""


def add_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine
    described = _described(context.served_name, engine)

    @app.get("/v1/board")
    async def board() -> Response:
        """What the server does now, and since its start: the page's board asks for it."""
        engine.check_health()
        metrics = engine.metrics
        return json_response(
            Board(
                at_s=time.monotonic(),
                engine=described,
                stats=metrics.stats,
                ended=metrics.ended(),
                first_token_s=metrics.distribution("time_to_first_token_seconds"),
                per_token_s=metrics.distribution("time_per_output_token_seconds"),
                latency_s=metrics.distribution("e2e_request_latency_seconds"),
            )
        )


def _described(name: str, engine: AsyncEngine) -> BoardEngine:
    config, ready = engine.config, engine.ready
    return BoardEngine(
        model=name,
        version=version("pageloom"),
        device=config.device.kind,
        dtype=config.model.dtype,
        kv_cache_dtype=config.cache.dtype,
        quantization=config.model.quantization,
        attention_backend=ready.attention_backend,
        max_model_len=ready.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_waiting=config.scheduler.max_waiting,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        speculation=config.scheduler.speculation.method,
    )
