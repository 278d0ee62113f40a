"""An engine that sleeps has no core and no memory, keeps whom it was given, and wakes up as if nothing had been; also
with other weights of the same model."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import save_tiny

from engine import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from engine.config import make_args
from engine.errors import ConfigError, EngineError, WeightsError
from engine.frontend.demo import demo_model_path
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings

pytestmark = pytest.mark.timeout(300)

SMALL: dict[str, Any] = {"device": "cpu", "compile": "none", "kv_cache_memory": 8 << 20, "max_model_len": 256}
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPTS = [[3 + (7 * i * i + place) % 240 for i in range(12 + 9 * place)] for place in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    paths = tmp_path_factory.mktemp("sleep") / "before", tmp_path_factory.mktemp("sleep") / "after"
    for path in paths:
        save_tiny("Llama", path)
    file = paths[1] / "model.safetensors"
    turned = {name: tensor.roll(1, 0).contiguous() for name, tensor in load_file(file).items()}
    save_file(turned, file, metadata={"format": "pt"})
    return paths


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[list[list[int]]]:
    """Of each checkpoint."""
    found = []
    for path in models:
        with LLM(path, **SMALL) as llm:
            found.append(tokens(llm))
    assert found[0] != found[1]
    return found


@pytest.fixture(params=[True, False], ids=["in process", "in a process of its own"])
def llm(request: pytest.FixtureRequest, models: tuple[Path, Path], cores: Callable[[], set[int]]) -> Iterator[LLM]:
    with LLM(models[0], in_process=request.param, **SMALL) as llm:
        yield llm


def test_it_wakes_up_as_if_nothing_had_been(
    llm: LLM, expected: list[list[list[int]]], cores: Callable[[], set[int]]
) -> None:
    assert tokens(llm) == expected[0] and not llm.is_sleeping
    form = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"))
    assert len(llm.generate("x", form, use_tqdm=False)[0].outputs[0].text) == 4
    llm.pin_prefix("head", {"prompt_token_ids": PROMPTS[3]})
    for _ in range(2):
        llm.sleep(level=2)
    assert llm.is_sleeping and not cores()
    with pytest.raises(EngineError, match="sleeps"):
        tokens(llm)
    for _ in range(2):
        llm.wake_up(tags=["weights"])
    assert not llm.is_sleeping
    assert tokens(llm) == expected[0]
    assert len(llm.generate("x", form, use_tqdm=False)[0].outputs[0].text) == 4, "the vocabulary is known again"
    assert llm.stats().kv_blocks_pinned > 0, "and what was pinned"


def test_in_process_nothing_of_a_model_is_left(models: tuple[Path, Path]) -> None:
    """Neither its weights, in any form, nor its KV cache: also where pieces were traced."""

    def tensors() -> int:
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
        return sum(each.numel() > 4096 for each in found if each.device.type == "cpu")

    before = tensors()
    with LLM(models[0], **SMALL | {"compile": "pieces"}) as llm:
        tokens(llm)
        llm.wait_compiled()
        tokens(llm)
        assert tensors() > before + 4
        llm.sleep()
        assert tensors() <= before


def test_other_weights_take_the_place_of_those_before(
    llm: LLM, models: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    tokens(llm)
    llm.update_weights(models[1])
    assert tokens(llm) == expected[1] and llm.config.model.path == str(models[1])
    llm.sleep()
    llm.update_weights(models[0])
    assert not llm.is_sleeping and tokens(llm) == expected[0]

    save_tiny("Llama", tmp_path / "larger", intermediate_size=160)
    with pytest.raises(ConfigError, match=r"another model \(intermediate_size: 96 here, \d+ there\): only"):
        llm.update_weights(tmp_path / "larger")
    with pytest.raises(ConfigError, match=r"GGUF there, safetensors, float32 in .*before; only a checkpoint"):
        llm.update_weights(demo_model_path())
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    save_tiny("Llama", tmp_path / "packed")
    file = tmp_path / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": awq}))
    with pytest.raises(ConfigError, match=r"packed: its weights are stored otherwise .*, quantised by awq"):
        llm.update_weights(tmp_path / "packed")
    broken = tmp_path / "broken"
    shutil.copytree(models[0], broken)
    lacks_one(broken)
    with pytest.raises(WeightsError):
        llm.update_weights(broken)
    assert tokens(llm) == expected[0], "what was served before is served again"


def lacks_one(checkpoint: Path) -> None:
    """Of its tensors: nobody sees it who does not load it."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_that_are_written_over_those_that_are_served(
    llm: LLM, models: tuple[Path, Path], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    served = tmp_path / "served"
    shutil.copytree(models[0], served)
    llm.update_weights(served)
    file = served / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match="cut short"):
        llm.update_weights(served)
    assert tokens(llm) == expected[0], "nothing was stopped"
    file.write_bytes(whole)
    lacks_one(served)
    with pytest.raises(
        EngineError, match=r"norm.*what was served before does not start any more, so .* sleeps: .*norm"
    ):
        llm.update_weights(served)
    assert llm.is_sleeping
    file.write_bytes(whole)
    llm.wake_up()
    assert tokens(llm) == expected[0]


def all_cores() -> set[int]:
    """Processes of this one's cores."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("engine.core.process" in part for part in child.cmdline()):
                found.add(child.pid)
    return found


@pytest.fixture
def cores() -> Callable[[], set[int]]:
    """Of the engines that the test makes: those of other tests may be there, too."""
    others = all_cores()
    return lambda: all_cores() - others


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_streams_go_on_behind_a_sleep(
    models: tuple[Path, Path], expected: list[list[list[int]]], replicas: int, cores: Callable[[], set[int]]
) -> None:
    async def run() -> None:
        settings = {"data_parallel_size": replicas, **SMALL}
        async with AsyncEngine(make_args(models[0], settings)) as engine:
            given: dict[int, list[int]] = {}

            async def ask(place: int) -> None:
                async for output in engine.generate({"prompt_token_ids": PROMPTS[place]}, PARAMS):
                    now = output.outputs[0].token_ids
                    assert now[: len(given.get(place, []))] == given.get(place, [])
                    given[place] = list(now)

            streams = [asyncio.create_task(ask(place)) for place in range(3)]
            while sum(map(len, given.values())) < 30:
                await asyncio.sleep(0.002)
            await engine.sleep()
            before = {place: len(each) for place, each in given.items()}
            assert engine.is_sleeping and not cores() and engine.stalled() is None
            streams.append(asyncio.create_task(ask(3)))  # who comes meanwhile waits, too
            await asyncio.sleep(0.5)
            assert {place: len(each) for place, each in given.items()} == before and 3 not in given
            await engine.wake_up()
            assert len(cores()) == replicas
            await asyncio.gather(*streams)
            assert [given[place] for place in range(4)] == expected[0]

            again = asyncio.create_task(ask(0))
            given.clear()
            while not given:
                await asyncio.sleep(0.002)
            await engine.update_weights(str(models[1]))
            await again
            assert len(given[0]) == len(expected[0][0]), "it goes on with the new weights"
            await ask(1)
            assert given[1] == expected[1][1]

            await asyncio.gather(*(engine.update_weights(str(path)) for path in (models[0], models[1], models[0])))
            served = expected[[str(path) for path in models].index(engine.config.model.path)]
            await ask(2)
            assert given[2] == served[2] and len(cores()) == replicas

    asyncio.run(run())


def test_over_http(models: tuple[Path, Path], tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(make_args(models[0], SMALL)) as engine:
            app = create_app(engine, "served", settings=ServerSettings(enable_sleep_mode=True))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:

                async def ask(place: int) -> dict[str, Any]:
                    body = {"prompt": PROMPTS[place], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
                    reply = await client.post("/v1/completions", json=body)
                    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 60
                    return dict(reply.json())

                before = await ask(0)
                for number in range(2):
                    reply = await client.post("/sleep", params={"level": number + 1})
                    assert reply.status_code == 200
                assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
                assert (await client.get("/health")).status_code == 200, "nobody is to restart it"
                ready = await client.get("/ready")
                assert ready.status_code == 503 and ready.json()["error"]["code"] == "asleep"
                waiting = asyncio.create_task(ask(0))
                await asyncio.sleep(0.3)
                assert not waiting.done()
                metrics = (await client.get("/metrics")).text
                for name in ("num_requests_waiting", "asleep"):
                    assert re.search(rf"^pageloom_{name}{{.*}} 1.0$", metrics, re.MULTILINE), name
                assert (await client.post("/wake_up", params={"tags": "weights"})).status_code == 200
                after = await waiting
                assert after["choices"] == before["choices"]
                assert (await client.get("/ready")).status_code == 200

                for path in (tmp_path / "nothing", tmp_path):
                    refused = await client.post("/update_weights_from_disk", json={"model_path": str(path)})
                    assert refused.status_code == 400 and refused.json()["error"]["param"] == "model_path"
                assert (await ask(0))["choices"] == before["choices"]
                changed = await client.post("/update_weights_from_disk", json={"model_path": str(models[1])})
                assert changed.json()["success"] is True
                assert (await ask(0))["system_fingerprint"] != before["system_fingerprint"]
                refused = await client.post("/sleep", params={"mode": "abort"})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == "mode"

    asyncio.run(run())


def test_an_engine_that_ends_with_its_core_does_not_sleep(models: tuple[Path, Path]) -> None:
    llm = LLM(models[0], in_process=False, core_restarts=0, **SMALL)
    with llm, pytest.raises(ConfigError, match="core_restarts=0"):
        llm.sleep()
