"""What whoever runs the server asks it, under vLLM's names; and what it says of routes that it does not have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from scripted_server import Server, post_all, save_model
from test_http_errors import error_of

from engine.core.wire import ResetPrefixCache
from entrypoints.server.load import GENERATING

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
    "/infill": {"input_prefix": "x"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "x"},
}


def with_client(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with server.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_ping_is_health_and_needs_no_key(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret")

    async def scenario(client: httpx.AsyncClient) -> None:
        async def states() -> list[int]:
            return [(await client.request(method, "/ping")).status_code for method in ("GET", "POST")]

        assert await states() == [200, 200]
        assert (await client.get("/health")).json() == {"kv_role": None, "kv_layout": {}}
        server.script.stalled = "because"
        assert await states() == [503, 503]

    with_client(server, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_the_load_is_the_requests_that_are_being_answered(tmp_path: Path, stream: bool) -> None:
    assert set(BODIES) == GENERATING - {"/v1/responses/compact"}, "whose question is longer than this context"
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    server = Server(save_model(tmp_path / "tiny", special=marks))

    async def scenario(client: httpx.AsyncClient) -> None:
        async def load() -> int:
            found: dict[str, int] = (await client.get("/load")).json()
            assert set(found) == {"server_load"}
            return found["server_load"]

        server.script.stall_at = 2
        asked = [
            asyncio.create_task(client.post(path, json={**body, "stream": stream})) for path, body in BODIES.items()
        ]
        while len(server.core.added) < len(asked):
            await asyncio.sleep(0.01)
        assert await load() == len(asked)
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        asked[0].cancel()
        await asyncio.gather(asked[0], return_exceptions=True)
        assert await load() == len(asked) - 1
        server.script.stall_at = None
        assert [(await one).status_code for one in asked[1:]] == [200] * (len(asked) - 1)
        assert (await client.post("/v1/completions", json={})).status_code == 400
        assert await load() == 0

    with_client(server, scenario)


def test_the_load_counts_nobody_who_was_not_let_in(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret")
    key = {"Authorization": "Bearer secret"}

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 401
        assert (await client.get("/load")).status_code == 401
        assert (await client.get("/load", headers=key)).json() == {"server_load": 0}

    with_client(server, scenario)


def test_settings_are_told_without_paths_and_without_the_key(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="a-secret-key")

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.get("/server_info")).status_code == 401
        reply = await client.get("/server_info", headers={"x-api-key": "a-secret-key"})
        told, config = reply.json(), server.engine.config
        assert "a-secret-key" not in reply.text
        for path in (config.model.path, config.model.tokenizer, config.compile.cache_dir, str(Path.home())):
            assert path and path not in reply.text
        assert told["models"] == ["tiny"] and told["dialect"] == "hermes"
        assert told["config"]["model"]["max_model_len"] == 256 == told["started"]["max_model_len"]
        assert told["config"]["limits"]["connections"] == config.limits.connections
        assert told["config"]["scheduler"]["max_num_seqs"] == config.scheduler.max_num_seqs
        assert told["started"]["num_blocks"] == 64 and "ledger" not in told["started"]

    with_client(server, scenario)


def test_a_draft_models_path_is_not_told() -> None:
    from entrypoints.server.operation import _without_files

    config = {"scheduler": {"speculation": {"model": "/secret/draft", "method": "eagle3"}}, "model": {"path": "/x"}}
    assert _without_files(config) == {"scheduler": {"speculation": {"method": "eagle3"}}, "model": {}}


def test_the_prefix_cache_is_forgotten(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    sent: list[Any] = []
    send = server.core.send
    server.core.send = lambda message: (sent.append(message), send(message))[1]  # type: ignore[assignment, func-returns-value]

    async def scenario(client: httpx.AsyncClient) -> None:
        reply = await client.post("/reset_prefix_cache")
        assert reply.status_code == 200 and not reply.content
        refused = await client.post("/reset_prefix_cache?reset_running_requests=true")
        assert refused.status_code == 400 and error_of(refused)["param"] == "reset_running_requests"
        assert (await client.post("/reset_prefix_cache?reset_running_requests=maybe")).status_code == 400

    with_client(server, scenario)
    assert [type(message) for message in sent if isinstance(message, ResetPrefixCache)] == [ResetPrefixCache]


def test_openais_client_is_told_what_there_is_instead(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    seen: list[str] = []

    async def scenario(client: httpx.AsyncClient) -> None:
        async def count(request: httpx.Request) -> None:
            seen.append(request.url.path)

        client.event_hooks = {"request": [count]}
        sdk = openai.AsyncOpenAI(base_url="http://scripted/v1", api_key="none", http_client=client)
        wav = ("a.wav", b"RIFF", "audio/wav")
        asked: dict[str, Awaitable[Any]] = {
            "text": sdk.audio.transcriptions.create(file=wav, model="tiny"),
            "/v1/chat/completions": sdk.audio.speech.create(input="x", model="tiny", voice="alloy"),
            "/v1/images is not served": sdk.images.generate(prompt="x"),
            "structured_outputs": sdk.moderations.create(input="x"),
            "not trained": sdk.fine_tuning.jobs.create(model="tiny", training_file="f"),
            "keeps no files": sdk.files.create(file=b"{}", purpose="batch"),
            "/v1/files": sdk.files.list(),
            "batches what runs": sdk.batches.create(
                completion_window="24h", endpoint="/v1/responses", input_file_id="f"
            ),
            "/v1/vector_stores": sdk.vector_stores.create(),
        }
        for says, asking in asked.items():
            with pytest.raises(openai.NotFoundError) as error:
                await asking
            assert says in error.value.message and error.value.code == "not_served"
        assert len(seen) == len(asked), "asked once, not again and again"

    with_client(server, scenario)


def test_what_vllm_manages_and_this_server_does_not_is_told_of(tiny_server_model: Path) -> None:
    paths = ["/sleep", "/wake_up", "/start_profile"]
    replies = post_all(Server(tiny_server_model), *((path, {}) for path in [*paths, "/sleepy", "/v1/filesystem"]))
    for path, reply in zip(paths, replies, strict=False):
        error = error_of(reply)
        assert reply.status_code == 404 and error["code"] == "not_served" and error["message"].startswith(f"{path} is ")
    for reply in replies[len(paths) :]:
        assert reply.status_code == 404 and error_of(reply)["code"] is None


def test_all_of_that_is_for_those_with_the_key(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret")
    replies = post_all(server, *((path, {}) for path in ("/sleep", "/v1/files", "/reset_prefix_cache", "/infill")))
    assert [reply.status_code for reply in replies] == [401] * 4
    assert "not_served" not in json.dumps([reply.json() for reply in replies])


def test_an_engine_with_one_core_is_not_scaled(tiny_server_model: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        reply = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2})
        assert reply.status_code == 400 and "started with more replicas" in reply.json()["error"]["message"]
        assert (await client.post("/is_scaling_elastic_ep")).json() == {"is_scaling_elastic_ep": False}
        reply = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": 2, "drain_timeout": -1})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "drain_timeout"
        for size in (True, "2", 2.0):
            reply = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": size})
            assert reply.status_code == 400 and "valid integer" in reply.json()["error"]["message"]

    with_client(Server(tiny_server_model), scenario)
