"""A body of many prompts is answered, however short the queue is: nobody is refused because of its own siblings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_families import save_tiny

from engine import AsyncEngine
from engine.config import make_args
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "compile": "none",
    "kv_cache_memory": 8 << 20,
    "max_model_len": 256,
    "threads": 1,
    "max_num_seqs": 2,
}


@pytest.mark.parametrize(("max_waiting", "n"), [(4, 2), (1, 1), (6, 1), (4, 5)])
def test_many_prompts_come_one_after_the_other(tmp_path: Path, max_waiting: int, n: int) -> None:
    save_tiny("Llama", tmp_path)
    prompts = [[5 + index, 6, 7] for index in range(9)]
    body = {"prompt": prompts, "n": n, "max_tokens": 6, "seed": 3, "temperature": 1.0, "ignore_eos": True}

    async def main() -> tuple[httpx.Response, httpx.Response, list[httpx.Response]]:
        async with AsyncEngine(make_args(str(tmp_path), {**SMALL, "max_waiting": max_waiting})) as engine:
            app = create_app(engine, "tiny", settings=ServerSettings())
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=60) as client:
                whole = await client.post("/v1/completions", json=body)
                streamed = await client.post("/v1/completions", json={**body, "stream": True})
                alone = [await client.post("/v1/completions", json={**body, "prompt": each}) for each in prompts]
                return whole, streamed, alone

    whole, streamed, alone = asyncio.run(main())
    assert whole.status_code == streamed.status_code == 200, whole.text
    texts = {choice["index"]: choice["text"] for choice in whole.json()["choices"]}
    assert [texts[index] for index in range(9 * n)] == [
        choice["text"] for each in alone for choice in sorted(each.json()["choices"], key=lambda one: one["index"])
    ]
    joined = dict.fromkeys(texts, "")
    for line in streamed.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                joined[choice["index"]] += choice["text"]
    assert joined == texts
