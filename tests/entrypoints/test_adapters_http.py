"""Adapters over HTTP: models of their own, that come and go while the server serves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import torch
from batch_program import options_of
from batch_program import run as run_batch
from safetensors.torch import save_file
from scripted_server import Server
from test_http_errors import error_of

from engine import AsyncEngine, EngineArgs
from engine.core.wire import AddRequest
from engine.errors import ConfigError
from entrypoints.batch import SOME_FAILED, _run
from entrypoints.serve import build_parser
from entrypoints.server.adapters import LoRAModule
from entrypoints.server.before_start import check_options

HI = [{"role": "user", "content": "hi"}]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.1.self_attn.o_proj.lora_"
    save_file(
        {f"{name}A.weight": torch.zeros(2, 64), f"{name}B.weight": torch.zeros(64, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    return tmp_path


def serving_adapters(model: Path) -> Server:
    server = Server(model)
    args = EngineArgs(model=str(model), served_model_name="tiny", device="cpu", compile="none", enable_lora=True)
    server.engine = AsyncEngine(args, client_factory=lambda config: server.core)
    return server


def test_adapters_are_models_that_come_and_go(tiny_server_model: Path, adapter: Path) -> None:
    server = serving_adapters(tiny_server_model)

    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"lora_name": "mine", "lora_path": str(adapter)}
        loaded = await client.post(LOAD, json=body)
        assert (loaded.status_code, "mine" in loaded.text) == (200, True), loaded.text
        assert error_of(await client.post(LOAD, json=body))["param"] == "lora_name"
        for taken in ("tiny", "Tiny", "tiny:latest"):  # Ollama's clients ask for the model by all of them
            assert error_of(await client.post(LOAD, json={**body, "lora_name": taken}))["param"] == "lora_name"
        wrong = await client.post(LOAD, json={"lora_name": "other", "lora_path": "/nowhere"})
        assert wrong.status_code == 400 and "no adapter_config.json" in error_of(wrong)["message"]
        base, mine = (await client.get("/v1/models")).json()["data"]
        assert (base["id"], mine["id"], mine["parent"], mine["root"]) == ("tiny", "mine", "tiny", str(adapter))
        assert (await client.get("/v1/models/mine")).json() == mine
        for path, asked in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", {"messages": HI, "max_tokens": 9}),
            ("/v1/responses", {"input": "x"}),
            ("/api/chat", {"messages": HI, "stream": False}),
            ("/api/generate", {"prompt": "x", "stream": False}),
        ):
            for model in ("mine", "tiny"):
                reply = (await client.post(path, json={**asked, "model": model})).json()
                assert reply["model"] == model, reply
                told = server.core.added[-1].lora_request
                assert (None if told is None else told.lora_name) == (None if model == "tiny" else "mine")
        pooled = await client.post("/v1/embeddings", json={"model": "mine", "input": "x"})
        assert pooled.status_code == 400 and "is an adapter" in error_of(pooled)["message"]
        assert (await client.post("/v1/embeddings", json={"model": "other", "input": "x"})).status_code == 404
        number = server.core.added[0].lora_request.lora_int_id  # type: ignore[union-attr]
        assert (await client.post(UNLOAD, json={"lora_name": "mine"})).status_code == 200
        assert (await client.post(UNLOAD, json={"lora_name": "mine"})).status_code == 404
        kept = client._transport.app.state.adapters  # type: ignore[attr-defined]  # httpx tells nobody else
        assert kept.has_left("mine") and not kept.has_left("other")
        chat = {"messages": HI, "model": "mine"}
        for path in ("/v1/chat/completions", "/api/chat"):
            assert (await client.post(path, json=chat)).status_code == 404
        await client.post(LOAD, json=body)
        assert not kept.has_left("mine")
        await client.post("/v1/chat/completions", json=chat)
        again = server.core.added[-1].lora_request
        assert again is not None and again.lora_int_id > number, "what was cached for the other one is not its own"
        newer = await client.post(LOAD, json={**body, "load_inplace": True, "is_3d_lora_weight": True})
        assert newer.status_code == 200 and newer.headers["x-pageloom-ignored"] == "is_3d_lora_weight"
        await client.post("/v1/chat/completions", json=chat)
        newest = server.core.added[-1].lora_request
        assert newest is not None and newest.lora_int_id > again.lora_int_id
        assert len((await client.get("/v1/models")).json()["data"]) == 2
        left = await client.post(UNLOAD, json={"lora_name": "mine", "lora_int_id": 7})
        assert left.status_code == 200 and left.headers["x-pageloom-ignored"] == "lora_int_id"

    async def go() -> None:
        async with server.client() as client:
            await scenario(client)

    asyncio.run(asyncio.wait_for(go(), 60))


def test_an_answer_names_the_adapter_that_is_unloaded_meanwhile(tiny_server_model: Path, adapter: Path) -> None:
    server = serving_adapters(tiny_server_model)

    async def go() -> None:
        async with server.client() as client:
            await client.post(LOAD, json={"lora_name": "mine", "lora_path": str(adapter)})
            told = client._transport.app.state.adapters  # type: ignore[attr-defined]
            add = server.core.added.append

            def unloaded(message: AddRequest) -> None:
                add(message)
                told.unload("mine")

            server.core.added = type("Added", (list,), {"append": lambda self, message: unloaded(message)})()
            reply = await client.post("/v1/chat/completions", json={"messages": HI, "model": "mine"})
            assert reply.json()["model"] == "mine" and not told.listed()

    asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora-modules", "a={adapter}"], "--enable-lora"),
        (["--enable-lora", "--lora-modules", "a={adapter}", "a={adapter}"], "names 'a' twice"),
        (["--enable-lora", "--lora-modules", "a=/nowhere"], "/nowhere: no adapter_config.json"),
    ],
)
def test_modules_are_looked_at_before_anything_is_loaded(adapter: Path, options: list[str], said: str) -> None:
    given = [each.replace("{adapter}", str(adapter)) for each in options]
    with pytest.raises(ConfigError, match=said):
        check_options(build_parser().parse_args(["m", *given]))


def test_lines_of_a_batch_name_adapters(tiny_server_model: Path, adapter: Path, tmp_path: Path) -> None:
    server, asked = serving_adapters(tiny_server_model), ["mine", "tiny", "nobody"]
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI, "model": name}}
        for name in asked
    ]
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    given = ["-i", str(source), "-o", str(answers), "--enable-lora", "--lora-modules", f"mine={adapter}"]
    assert run_batch(server, options_of(given)) == SOME_FAILED
    results = {each["custom_id"]: each["response"] for each in map(json.loads, answers.read_text().splitlines())}
    assert [results[name]["status_code"] for name in asked] == [200, 200, 404]
    assert results["mine"]["body"]["model"] == "mine"
    told = [message.lora_request and message.lora_request.lora_name for message in server.core.added]
    assert sorted(told, key=str) == [None, "mine"]
    with pytest.raises(ConfigError, match="/nowhere: no adapter_config"):
        asyncio.run(_run(options_of([*given[:-1], "mine=/nowhere"])))


def test_a_server_without_adapters_says_so(tiny_server_model: Path, adapter: Path) -> None:
    server = Server(tiny_server_model)

    async def go() -> None:
        async with server.client() as client:
            reply = await client.post(LOAD, json={"lora_name": "mine", "lora_path": str(adapter)})
            assert reply.status_code == 400 and "--enable-lora" in error_of(reply)["message"]

    asyncio.run(asyncio.wait_for(go(), 60))


def test_modules_are_named_in_two_ways(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = build_parser().parse_args(["m", "--lora-modules", "a=/x/y=z", '{"name": "b", "path": "/p"}'])
    assert parsed.lora_modules == [LoRAModule("a", "/x/y=z"), LoRAModule("b", "/p")]
    for wrong in ("a", "=x", '{"name": "b"}', "{", '{"name": "b", "path": 1}'):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["m", "--lora-modules", wrong])
        assert "--lora-modules" in capsys.readouterr().err
