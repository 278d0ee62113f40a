"""An engine that serves records some of its steps where it is asked to, and says more in its log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_families import save_tiny

from engine import LLM, AsyncEngine, SamplingParams
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


@pytest.fixture(params=[True, False], ids=["in process", "in a process of its own"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with LLM(model, in_process=request.param, **SMALL) as llm:
        yield llm


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
    with pytest.raises(InvalidRequestError, match="at most 1000 steps of a profile"):
        llm.start_profile(tmp_path, steps=1001)
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
        for wrong in ({"num_steps": 0}, {"num_steps": 1001}, {"output_dir": "/"}, {"num_steps": "many"}):
            assert (await client.post("/start_profile", json=wrong)).status_code == 400, wrong
        started = await client.post("/start_profile", json={"num_steps": 5, "activities": ["CPU"]})
        assert started.status_code == 200, started.text
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
