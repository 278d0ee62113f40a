"""Replicas that come and go, however long whoever asked for it stays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
from fastapi import FastAPI

from entrypoints.server.scaling import add_routes


def test_it_goes_on_and_is_told_of_when_the_caller_has_left() -> None:
    async def scenario() -> None:
        may_end, sizes = asyncio.Event(), list[int]()

        async def scale(replicas: int, drain_timeout_s: float) -> None:
            await may_end.wait()
            sizes.append(replicas)

        app = FastAPI()
        add_routes(app, SimpleNamespace(engine=SimpleNamespace(scale=scale)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:

            async def is_scaling() -> bool:
                return bool((await client.post("/is_scaling_elastic_ep")).json()["is_scaling_elastic_ep"])

            assert not await is_scaling()
            call = asyncio.create_task(client.post("/scale_elastic_ep", json={"new_data_parallel_size": 3}))
            while not await is_scaling():
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert call.cancelled() and await is_scaling()
            may_end.set()
            while await is_scaling():
                await asyncio.sleep(0)
            assert sizes == [3]

    asyncio.run(asyncio.wait_for(scenario(), 60))
