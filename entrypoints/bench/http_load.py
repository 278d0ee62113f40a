"""`engine-bench serve`: an HTTP load client for any OpenAI-compatible server (streaming /v1/completions)."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import TYPE_CHECKING

from engine.errors import EngineError
from entrypoints.bench.metrics import Figures, Record, figures, median_of, table
from entrypoints.bench.workloads import WARM_UP_REPEAT, WARM_UP_SEED, BenchRequest, random_workload, workload

if TYPE_CHECKING:
    import httpx
    from tqdm import tqdm

_COMPILING = "pageloom_compiling{"
_COMPILING_POLL_S = 0.2


class LoadClient:
    """Sends requests at their arrival times and times every token at the client."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self._url = options.base_url.rstrip("/") + "/v1/completions"
        self._model = model
        self._extra = options.extra_body
        self._headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._limit = asyncio.Semaphore(options.max_concurrency or 10**6)

    async def records(self, client: httpx.AsyncClient, requests: list[BenchRequest], bar: tqdm[None]) -> list[Record]:
        """Of each request, in their order; those that failed say why."""
        start = time.perf_counter() + 0.05
        return await asyncio.gather(*(self._one(client, r, start, bar) for r in requests))

    async def run(self, client: httpx.AsyncClient, requests: list[BenchRequest], bar: tqdm[None]) -> Figures:
        records = await self.records(client, requests, bar)
        good = [r for r in records if r.error is None]
        if not good:
            raise EngineError(f"every request failed; the first: {records[0].error}")
        return figures(records, min(r.submitted for r in good), max(r.finished for r in good))

    async def _one(self, client: httpx.AsyncClient, request: BenchRequest, start: float, bar: tqdm[None]) -> Record:
        await asyncio.sleep(max(0.0, start + request.arrival_s - time.perf_counter()))
        async with self._limit:
            record = Record(time.perf_counter(), None, 0.0, len(request.prompt_token_ids), 0, request.max_tokens)
            try:
                await self._stream(client, request, record)
            except Exception as error:
                record.error = repr(error)
            bar.update()
            return record

    async def _stream(self, client: httpx.AsyncClient, request: BenchRequest, record: Record) -> None:
        body = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        last, chunks, used = 0.0, 0, None
        async with client.stream("POST", self._url, json=body, headers=self._headers) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                now, chunk = time.perf_counter(), json.loads(data)
                if chunk.get("error"):
                    raise RuntimeError(str(chunk["error"])[:300])
                used = (chunk.get("usage") or {}).get("completion_tokens", used)
                choices = chunk.get("choices") or []
                if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
                    chunks += 1
                    if record.first_token is None:
                        record.first_token = now
                    else:
                        record.gaps.append(now - last)
                    last = now
        record.finished = last or time.perf_counter()
        record.output_tokens = used if used is not None else chunks


async def _run(options: argparse.Namespace, model: str, requests: list[BenchRequest], *, progress: bool) -> Figures:
    import httpx
    from tqdm import tqdm

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=options.timeout, limits=limits, trust_env=False) as client:
        with tqdm(total=len(requests), disable=not progress, desc="Requests") as bar:
            return await LoadClient(options, model).run(client, requests, bar)


def _served_model(options: argparse.Namespace) -> str:
    if options.model:
        return str(options.model)
    import httpx

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = options.base_url.rstrip("/") + "/v1/models"
    try:
        reply = httpx.get(url, headers=headers, timeout=10, trust_env=False).raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise EngineError(f"{url} names no model ({error!r}); is the server up? --model names one") from error


def wait_compiled(options: argparse.Namespace) -> None:
    """What is measured is the steady state: while a server of ours says that it still compiles, wait. Others have no
    such metric."""
    import httpx

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = options.base_url.rstrip("/") + "/metrics"
    while True:
        try:
            text = httpx.get(url, headers=headers, timeout=10, trust_env=False).text
        except httpx.HTTPError:
            return
        if not any(line.startswith(_COMPILING) and line.endswith(" 1.0") for line in text.splitlines()):
            return
        time.sleep(_COMPILING_POLL_S)


def serve(options: argparse.Namespace) -> list[dict[str, object]]:
    """Each named workload, or one random one, against the server: the median over the repeats after a warm-up.

    Raises EngineError for a workload of beam searches, whose tokens do not stream."""
    for name in options.workload or ():
        if any(request.beams for request in workload(name)):
            raise EngineError(
                f"{name} is a beam search, whose tokens do not stream: run it with engine-bench throughput"
            )
    model = _served_model(options)
    wait_compiled(options)
    results: list[dict[str, object]] = []
    warm_up = workload("WARM", WARM_UP_REPEAT) if options.workload else _random(options, -1)[:4]
    asyncio.run(_run(options, model, warm_up, progress=False))
    for name in options.workload or ["random"]:
        runs = []
        if name in ("W1", "W5"):
            asyncio.run(_run(options, model, workload(name, WARM_UP_REPEAT), progress=False))
        for repeat in range(options.reps):
            requests = workload(name, repeat) if options.workload else _random(options, repeat)
            runs.append(asyncio.run(_run(options, model, requests, progress=options.progress)))
        result = median_of(runs)
        print(table(f"Serving, {name}", result), flush=True)
        results.append({"workload": name, "mode": "http", **result})
    return results


def _random(options: argparse.Namespace, repeat: int) -> list[BenchRequest]:
    rate = options.request_rate if options.request_rate != float("inf") else None
    return random_workload(
        options.num_prompts,
        options.input_len,
        options.output_len,
        rate,
        options.vocab_size,
        options.seed + repeat if repeat >= 0 else WARM_UP_SEED,
        options.range_ratio,
    )
