"""An engine that serves records some of its steps where it is asked to, and says more in its log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_families import save_tiny

from engine import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from engine.config import make_args
from engine.errors import ConfigError, InvalidRequestError
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings

pytestmark = pytest.mark.timeout(300)

SMALL: dict[str, Any] = {"device": "cpu", "compile": "none", "kv_cache_memory": 8 << 20, "max_model_len": 256}
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = {"prompt_token_ids": [3, 5, 7, 11]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "model"
    save_tiny("Llama", path)
    return path


@pytest.fixture
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with LLM(model, in_process=getattr(request, "param", True), **SMALL) as llm:
        yield llm


both = pytest.mark.parametrize("llm", [True, False], ids=["in process", "in a process of its own"], indirect=True)


def check_files(files: list[Path], steps: int) -> None:
    """A trace that has the steps' operators, and a table whose parts are their time."""
    assert [re.sub(r".*-\d+\.", "", file.name) for file in files] == ["trace.json.gz", "txt"]
    with gzip.open(files[0]) as trace:
        events = json.load(trace)["traceEvents"]
    assert sum(event.get("name", "").startswith("aten::") for event in events) > steps
    table = files[1].read_text()
    assert table.startswith(f"{steps} steps in ")
    wall_s = float(table.split(" in ")[1].split()[0])
    for thread in ("runner", "core"):
        parts = table.split(f"\n{thread} ")[1].split("\n\n")[0].splitlines()[1:]
        spent = {line[2:20].strip(): float(line[20:30]) for line in parts}
        assert sum(spent.values()) == pytest.approx(wall_s, rel=0.2, abs=0.01), table
        assert {"runner": "model", "core": "collect"}[thread] in spent


@both
def test_as_many_steps_as_are_wanted(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(tmp_path / "new" / "folder", steps=7)
    assert llm.stats().profiling
    with pytest.raises(ConfigError, match="runs already"):
        llm.start_profile(tmp_path)
    expected = llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert not llm.stats().profiling
    check_files(llm.stop_profile(), 7)
    assert llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_until_it_is_stopped(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile was begun"):
        llm.stop_profile()
    found = []
    for _ in range(2):
        llm.start_profile(tmp_path)
        llm.generate([PROMPT], PARAMS, use_tqdm=False)
        assert llm.stats().profiling
        found += llm.stop_profile()
        assert not llm.stats().profiling
        check_files(found[-2:], 20)
    assert len(set(found)) == 4


def test_what_cannot_be(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        llm.start_profile(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match="at most 100 steps of a profile"):
        llm.start_profile(tmp_path, steps=101)
    llm.sleep()
    with pytest.raises(ConfigError, match="sleeps"):
        llm.start_profile(tmp_path)


def test_over_http(model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncEngine(make_args(model, SMALL)) as engine:
            app = create_app(engine, "served", settings=ServerSettings(profile_dir=tmp_path))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
                await talk(client)
            bare = httpx.ASGITransport(create_app(engine, "served"))
            async with httpx.AsyncClient(transport=bare, base_url="http://server") as client:
                refused = await client.post("/start_profile")
                assert refused.status_code == 404 and "--profile-dir" in refused.text

    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.post("/stop_profile")).status_code == 400
        for wrong in (
            {"num_steps": 0},
            {"num_steps": 101},
            {"output_dir": "/"},
            {"num_steps": "many"},
            {"num_steps": True},
        ):
            assert (await client.post("/start_profile", json=wrong)).status_code == 400, wrong
        body = {"num_steps": 5, "activities": ["CPU"]}
        both = await asyncio.gather(*(client.post("/start_profile", json=body) for _ in range(2)))
        started, refused = sorted(both, key=lambda each: each.status_code)
        assert (started.status_code, refused.status_code) == (200, 400), started.text
        assert started.headers["x-pageloom-ignored"] == "activities"
        assert (await client.post("/start_profile")).status_code == 400
        body = {"model": "served", "prompt": [3, 5, 7], "max_tokens": 9, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        files = [Path(file) for file in (await client.post("/stop_profile")).json()["files"]]
        assert str(files[0]).startswith(started.json()["path"])
        check_files(files, 5)
        assert (await client.post("/log_level", json={"level": "loud"})).status_code == 400
        before = logging.getLogger().level
        try:
            for level, number in (("debug", logging.DEBUG), ("error", logging.ERROR)):
                assert (await client.post("/log_level", json={"level": level})).json() == {"level": level}
                assert logging.getLogger().level == number
        finally:
            logging.getLogger().setLevel(before)

    asyncio.run(run())


@both
def test_what_is_open_when_an_engine_ends_is_written(llm: LLM, tmp_path: Path) -> None:
    """Sleep ends it, too, and what is told afterwards is true."""
    llm.start_profile(tmp_path)
    llm.generate([PROMPT], PARAMS, use_tqdm=False)
    llm.sleep()
    check_files(llm.stop_profile(), 20)
    llm.wake_up()
    assert len(llm.stop_profile()) == 2 and not llm.stats().profiling
    llm.start_profile(tmp_path, steps=3)
    llm.generate([PROMPT], PARAMS, use_tqdm=False)
    check_files(llm.stop_profile(), 3)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, "5", 101])
def test_a_number_of_steps_that_is_none(steps: Any, model: Path, tmp_path: Path) -> None:
    with LLM(model, **SMALL) as llm, pytest.raises(InvalidRequestError, match="num_steps"):
        llm.start_profile(tmp_path, steps=steps)


def test_beside_requests_that_are_under_way(llm: LLM, tmp_path: Path) -> None:
    """What they bring is theirs."""
    llm.llm_engine.add_request("r", PROMPT, PARAMS)
    llm.llm_engine.step()
    for ask in (lambda: llm.start_profile(tmp_path), llm.stop_profile):
        with pytest.raises(ConfigError, match="between requests"):
            ask()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    llm.start_profile(tmp_path)


def test_while_steps_are_ahead_that_wait_for_masks(model: Path, tmp_path: Path) -> None:
    """The loop, which sends them, must not wait for the thread that computes."""
    form = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(regex="[a-z ]{400}"))

    async def run() -> None:
        async with AsyncEngine(make_args(model, SMALL | {"async_scheduling": True})) as engine:
            stream = engine.generate("x", form, "r")
            first = await anext(stream)
            for _ in range(3):
                await asyncio.wait_for(engine.profiles.start_async(tmp_path, 4), 60)
                await asyncio.wait_for(engine.profiles.stop_async(), 60)
            last = [output async for output in stream][-1]
            assert len(last.outputs[0].token_ids) > len(first.outputs[0].token_ids)

    asyncio.run(run())
    assert len(list(tmp_path.iterdir())) == 6


def test_a_process_may_end_with_a_profile_open(model: Path, tmp_path: Path) -> None:
    """Also one that did not close its engine."""
    script = f"""
from engine import LLM, SamplingParams
llm = LLM({str(model)!r}, **{SMALL!r})
llm.start_profile({str(tmp_path)!r})
llm.generate("x", SamplingParams(max_tokens=4), use_tqdm=False)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
