"""`/v1/responses` as a WebSocket: turns, lanes, what is kept while it is open, who may open one, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from scripted_server import Server, save_model
from sockets import GUARD_S, serving
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.limits import Limits

EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
Socket = ClientConnection


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("socket") / "tiny", context=4096)


@asynccontextmanager
async def serve(model: Path, limits: Limits | None = None, **options: Any) -> AsyncIterator[tuple[Server, Any, str]]:
    """The server, its application, and the URL of the route."""
    server = Server(model, limits=limits, **options)
    server.answer = "Yes."
    async with server.app() as app, serving(app, limits or Limits()) as door:
        yield server, app, f"ws://127.0.0.1:{door.port}/v1/responses"


async def say(socket: Socket, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "input": "hi", **fields}))


async def hear(socket: Socket) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), GUARD_S))
    EVENT.validate_python(event)
    return event


async def turn(socket: Socket, **fields: Any) -> list[dict[str, Any]]:
    """All events up to the last."""
    await say(socket, **fields)
    events = [await hear(socket)]
    while events[-1]["type"] not in ENDS:
        events.append(await hear(socket))
    return events


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        await asyncio.wait_for(work(), 2 * GUARD_S)

    asyncio.run(guarded())


def prompts(server: Server) -> list[str]:
    return [server.engine.tokenizer.decode(each.prompt_token_ids) for each in server.core.added]


def test_turns_go_on_from_what_is_stored_and_from_what_is_not(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (server, _, url), connect(url) as socket, connect(url) as other:
            first = await turn(socket, store=False)
            assert [each["sequence_number"] for each in first] == list(range(len(first)))
            assert "".join(each["delta"] for each in first if each["type"] == "response.output_text.delta") == "Yes."
            name = first[-1]["response"]["id"]
            second = await turn(socket, input="and?", previous_response_id=name)
            assert prompts(server)[-1].endswith("<|user|>hi<|assistant|>Yes.<|user|>and?<|assistant|>")
            third = await turn(socket, input="so", previous_response_id=second[-1]["response"]["id"], store=False)
            await turn(socket, input="?", previous_response_id=third[-1]["response"]["id"])
            assert prompts(server)[-1].count("<|user|>") == 4
            # Nobody else's, not even over another socket.
            (refused,) = await turn(other, previous_response_id=name)
            assert refused["status"] == 400 and refused["error"]["code"] == "previous_response_not_found"
        async with serve(model) as (server, _, url), connect(url) as socket:
            stored = (await turn(socket))[-1]["response"]["id"]
            async with connect(url) as other:
                assert (await turn(other, previous_response_id=stored))[-1]["type"] == "response.completed"

    run(work)


def test_what_is_not_stored_is_gone_with_its_socket(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (_, app, url):
            async with connect(url) as socket:
                name = (await turn(socket, store=False))[-1]["response"]["id"]
                store, passing = app.state.sockets.stores
                assert store.shown(name) is None and passing.shown(name) is not None
            while passing.shown(name) is not None:
                await asyncio.sleep(0.01)

    run(work)


def test_lanes_run_at_once_and_turns_of_one_in_order(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (server, _, url), connect(url) as socket:
            server.script.stall_at = 1
            for lane, text in (("a", "a1"), ("a", "a2"), ("b", "b1")):
                await say(socket, stream_id=lane, input=text)
            heard = []
            while {each["stream_id"] for each in heard if "delta" in each} != {"a", "b"}:
                heard.append(await hear(socket))
            assert len(server.core.added) == 2
            server.script.stall_at = None
            while sum(each["type"] in ENDS for each in heard) < 3:
                heard.append(await hear(socket))
            asked = [each.partition("<|user|>")[2][:2] for each in prompts(server)]
            assert sorted(asked[:2]) == ["a1", "b1"] and asked[2] == "a2"
            kinds = [each["type"] for each in heard if each["stream_id"] == "a"]
            assert kinds.index("response.completed") < len(kinds) - kinds[::-1].index("response.created")

    run(work)


def test_a_warmed_prompt_is_gone_on_from_and_says_nothing(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (server, _, url), connect(url) as socket:
            warm = await turn(socket, generate=False, instructions="Be brief.", store=False)
            assert [each["type"] for each in warm] == [
                "response.created",
                "response.in_progress",
                "response.completed",
            ]
            response = warm[-1]["response"]
            assert response["output"] == [] and response["usage"]["output_tokens"] == 0
            assert server.core.added[-1].max_tokens == 1
            await turn(socket, previous_response_id=response["id"], input="and?")
            assert prompts(server)[-1].endswith("<|user|>hi<|user|>and?<|assistant|>")

    run(work)


def test_what_is_wrong_with_a_message_ends_nothing_else(model: Path) -> None:
    async def work() -> None:
        async with serve(model, Limits(pipelined=1)) as (server, _, url), connect(url) as socket:
            wrong: list[tuple[dict[str, Any], str | None]] = [
                ({"type": "response.steer"}, "type"),
                ({"temperature": "hot"}, "temperature"),
                ({"model": "other"}, "model"),
                ({"background": True}, "background"),
                ({"stream_id": 7}, "stream_id"),
                ({"input": []}, "input"),
                ({"previous_response_id": "resp_none"}, "previous_response_id"),
            ]
            for fields, param in wrong:
                (told,) = await turn(socket, **fields)
                assert told["status"] in (400, 404) and told["error"]["param"] == param, told
            for raw in ("", "{", "[1]", b"\xff", '{"type": "response.create", "input": "\\ud800"}', "[" * 1000):
                await socket.send(raw)
                assert (await hear(socket))["status"] == 400
            server.script.stall_at = 1
            for _ in range(3):
                await say(socket)
            while (told := await hear(socket))["type"] != "error":
                pass
            assert "--limit pipelined=1" in told["error"]["message"]
            server.script.stall_at = None
            ends = 0
            while ends < 2:
                ends += (await hear(socket))["type"] == "response.completed"
            assert (await turn(socket))[-1]["type"] == "response.completed"

    run(work)


def test_long_messages_are_read_and_too_long_ones_close_the_socket(model: Path) -> None:
    async def work() -> None:
        async with serve(model, Limits(websocket_bytes=200_000)) as (_, __, url), connect(url) as socket:
            told = await turn(socket, input="a" * 150_000)
            assert told[0]["error"]["code"] == "context_length_exceeded"
            await socket.send("a" * 200_001)
            with pytest.raises(ConnectionClosed):
                await hear(socket)
            assert socket.close_code == 1009

    run(work)


def test_who_leaves_takes_his_turns_along(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (server, app, url):
            server.script.stall_at = 2
            async with connect(url) as socket:
                for lane in "ab":
                    await say(socket, stream_id=lane)
                while len(server.core.added) < 2:
                    await asyncio.sleep(0.01)
            while server.core.running or app.state.sockets._open:
                await asyncio.sleep(0.01)
            assert len(server.core.aborted) == 2

    run(work)


def test_the_end_of_the_server_lets_turns_go_on_and_takes_no_new_one(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (server, app, url), connect(url) as idle, connect(url) as busy:
            server.script.stall_at = 2
            await say(busy)
            while not server.core.added:
                await asyncio.sleep(0.01)
            app.state.sockets.drain()
            with pytest.raises(ConnectionClosed):
                await hear(idle)
            assert idle.close_code == 1012
            await say(busy, stream_id="more")
            while (told := await hear(busy))["type"] != "error":
                pass
            assert told["stream_id"] == "more"
            server.script.stall_at = None
            while (told := await hear(busy))["type"] != "response.completed":
                pass
            with pytest.raises(ConnectionClosed):
                await hear(busy)
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 503

    run(work)


def test_the_longest_silent_one_gives_way_and_none_with_a_turn(model: Path) -> None:
    async def work() -> None:
        limits = Limits(websockets=2)
        async with serve(model, limits) as (server, app, url), connect(url) as busy, connect(url) as idle:
            server.script.stall_at = 0
            await say(busy)
            while not server.core.added:
                await asyncio.sleep(0.01)
            async with connect(url) as third:
                assert (await hear(idle))["error"]["code"] == "websocket_connection_limit_reached"
                await say(third)
                while len(server.core.added) < 2 or len(app.state.sockets._open) > 2:
                    await asyncio.sleep(0.01)
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url)
                assert refused.value.response.status_code == 503

    run(work)


def test_an_old_socket_says_so_and_is_closed(model: Path) -> None:
    async def work() -> None:
        async with serve(model, Limits(websocket_s=0.2)) as (_, __, url), connect(url) as socket:
            assert (await hear(socket))["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(ConnectionClosed):
                await hear(socket)

    run(work)


def test_only_who_has_the_key_opens_one_and_no_strange_page(model: Path) -> None:
    async def work() -> None:
        pages = {"https://a.example": None, "https://b.example": 403, "null": 403, "http://[": 403}
        async with serve(model, api_key="secret", allowed_origins=["https://a.example"]) as (_, __, url):
            with pytest.raises(InvalidStatus) as refused:
                await connect(url)
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
            for page, status in pages.items():
                key = {"Authorization": "Bearer secret", "x-request-id": "mine"}
                if status is None:
                    async with connect(url, additional_headers=key, origin=page) as socket:  # type: ignore[arg-type]
                        assert socket.response is not None and socket.response.headers["x-request-id"] == "mine"
                    continue
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url, additional_headers=key, origin=page)  # type: ignore[arg-type]
                assert refused.value.response.status_code == status
            own = url.replace("ws:", "http:").removesuffix("/v1/responses")
            async with connect(url, additional_headers=key, origin=own):  # type: ignore[arg-type]
                pass

    run(work)


def test_other_routes_open_none(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (_, __, url):
            for path in ("/v1/chat/completions", "/health", "/none"):
                with pytest.raises(InvalidStatus) as refused:
                    await connect(url.replace("/v1/responses", path))
                assert refused.value.response.status_code == 403

    run(work)


def test_openai_s_client_goes_on_over_a_socket(model: Path) -> None:
    async def work() -> None:
        async with serve(model) as (_, __, url):
            base = url.replace("ws:", "http:").removesuffix("/responses")
            client = openai.AsyncOpenAI(base_url=base, api_key="none")
            async with client.responses.connect() as connection:
                previous: str | None = None
                for _ in range(3):
                    await connection.send(
                        {"type": "response.create", "model": "tiny", "input": "hi", "previous_response_id": previous}
                    )
                    async for event in connection:
                        if event.type == "response.completed":
                            assert event.response.output_text == "Yes."
                            previous = event.response.id
                            break

    run(work)
