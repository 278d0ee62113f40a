"""A server whose engine is real, with a tiny model of random weights: its figures are those of real steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from engine import AsyncEngine, EngineArgs
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
REPEATS = "abcabcabcabcabcabcabcabcabcabc"


def engine_args(model: Path) -> EngineArgs:
    return EngineArgs(
        model=str(model),
        served_model_name="tiny",
        device="cpu",
        compile="none",
        load_format="dummy",
        kv_cache_memory=1 << 22,
        speculative_config=DRAFTS,
    )


@asynccontextmanager
async def served(model: Path, settings: ServerSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    engine = AsyncEngine(engine_args(model), in_process=True)
    await engine.start()
    app = create_app(engine, "tiny", settings=settings or ServerSettings())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://observed", timeout=60) as client,
    ):
        yield client


def page_after_some_requests(model: Path) -> str:
    """/metrics after: the same prompt twice, then three samples of it, and one that is refused."""

    async def go() -> str:
        async with served(model) as client:
            body = {"prompt": REPEATS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            for _ in range(2):
                (await client.post("/v1/completions", json=body)).raise_for_status()
            (await client.post("/v1/completions", json={**body, "temperature": 1, "n": 3})).raise_for_status()
            assert (await client.post("/v1/completions", json={**body, "prompt": "x" * 999})).status_code == 400
            return (await client.get("/metrics")).text

    return asyncio.run(go())
