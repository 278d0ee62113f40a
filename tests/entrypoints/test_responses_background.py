"""`/v1/responses` in the background: polled, cancelled, deleted, and stored by one hand, off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from scripted_server import Server, save_model
from test_responses_api import URL, serve

from entrypoints.server.responses_api import routes
from entrypoints.server.responses_api.store import ResponseStore

ASKED = {"input": "x", "background": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("background") / "tiny", context=4096)


class SlowStore:
    """What is put after the first waits for `go_on`."""

    def __init__(self, store: ResponseStore) -> None:
        self.put, self.threads = store.put, list[threading.Thread]()
        self.waits, self.go_on = threading.Event(), threading.Event()
        store.put = self._put  # type: ignore[method-assign]

    def _put(self, stored: Any) -> None:
        self.threads.append(threading.current_thread())
        if len(self.threads) > 1:
            self.waits.set()
            assert self.go_on.wait(10)
        self.put(stored)


def run(server: Server, work: Callable[[httpx.AsyncClient, FastAPI], Awaitable[None]]) -> None:
    async def go() -> None:
        async with server.app() as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://scripted", timeout=20) as client:
                await work(client, app)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_background_responses_are_polled_and_cancelled(model: Path) -> None:
    async def go() -> None:
        async with server.client() as client:
            made = (await client.post(URL, json={"input": "x", "background": True})).json()
            assert made["status"] == "in_progress" and made["background"]
            while (found := (await client.get(f"{URL}/{made['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0.005)
            assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "Yes."
            assert (await client.post(f"{URL}/{made['id']}/cancel")).status_code == 400
            server.script.step_s = 10
            slow = (await client.post(URL, json={"input": "x", "background": True})).json()
            await asyncio.sleep(0.05)
            assert (await client.post(f"{URL}/{slow['id']}/cancel")).json()["status"] == "cancelled"
            await asyncio.sleep(0.05)
            assert (await client.get(f"{URL}/{slow['id']}")).json()["status"] == "cancelled"
            assert len(server.core.aborted) == 1
            server.script.step_s, server.script.refuse = 0, ("failed", "no")
            failed = (await client.post(URL, json={"input": "x", "background": True})).json()
            while (found := (await client.get(f"{URL}/{failed['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0.005)
            assert found["status"] == "failed" and found["error"]["code"] == "request_failed"

    server = serve(model)
    asyncio.run(asyncio.wait_for(go(), 30))


def test_what_is_being_stored_is_over_and_cannot_be_cancelled(model: Path) -> None:
    async def work(client: httpx.AsyncClient, app: FastAPI) -> None:
        slow = SlowStore(app.state.sockets.stores[0])
        name = (await client.post(URL, json=ASKED)).json()["id"]
        await asyncio.to_thread(slow.waits.wait, 10)
        assert (await client.post(f"{URL}/{name}/cancel")).status_code == 400
        slow.go_on.set()
        while (found := (await client.get(f"{URL}/{name}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.005)
        assert found["status"] == "completed" and found["output"]
        assert threading.main_thread() not in slow.threads and len(slow.threads) == 2

    run(serve(model), work)


def test_what_is_deleted_while_it_is_being_stored_stays_away(model: Path) -> None:
    async def work(client: httpx.AsyncClient, app: FastAPI) -> None:
        slow = SlowStore(app.state.sockets.stores[0])
        name = (await client.post(URL, json=ASKED)).json()["id"]
        await asyncio.to_thread(slow.waits.wait, 10)
        deleting = asyncio.create_task(client.delete(f"{URL}/{name}"))
        await asyncio.sleep(0.05)
        slow.go_on.set()
        assert (await deleting).json()["deleted"]
        await asyncio.sleep(0.05)
        assert (await client.get(f"{URL}/{name}")).status_code == 404

    run(serve(model), work)


def test_what_is_cancelled_at_any_moment_holds_nothing_or_is_whole(model: Path) -> None:
    async def work(client: httpx.AsyncClient, app: FastAPI) -> None:
        for moment in range(40):
            name = (await client.post(URL, json=ASKED)).json()["id"]
            for _ in range(moment):
                await asyncio.sleep(0)
            replies = await asyncio.gather(*(client.post(f"{URL}/{name}/cancel") for _ in range(2)))
            task = app.state.background._running.get(name)
            if task is not None:
                await asyncio.wait({task[0]})
            found = (await client.get(f"{URL}/{name}")).json()
            told = [reply.json()["status"] for reply in replies if reply.status_code == 200]
            assert told in (["cancelled"], []) and found["status"] == ("cancelled" if told else "completed")
            assert bool(found["output"]) == (not told)

    run(serve(model), work)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"background": True}])
def test_a_request_that_is_still_being_read_ends_with_its_client_and_with_the_server(
    model: Path, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never(*_: object) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def work(client: httpx.AsyncClient, app: FastAPI) -> None:
        monkeypatch.setattr(routes, "handler_of", never)
        asked = asyncio.create_task(client.post(URL, json={"input": "x", **fields}))
        await begun.wait()
        app.state.unanswered.end()
        assert (await asked).status_code == 503 and ended.is_set()

    run(serve(model), work)
