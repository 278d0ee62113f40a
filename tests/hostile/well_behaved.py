"""Clients that only want their answers, one request after the other, and note every error and how long they waited."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
from server import KEY, SERVED

HEADERS = {"Authorization": f"bearer {KEY}"}


@dataclass
class Seen:
    """By one client."""

    answers: int = 0
    tokens: int = 0
    longest_gap_s: float = 0.0
    began: float = field(default_factory=time.monotonic)
    gap_at_s: float = 0.0
    """when the longest gap ended, since the start"""
    errors: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    """each is the answer to the same question: there must be one"""


async def _ask(client: httpx.AsyncClient, number: int, seen: Seen, stop: asyncio.Event) -> None:
    body = {
        "model": SERVED,
        "messages": [{"role": "user", "content": f"Count to {number + 20} and explain why."}],
        "max_tokens": 200,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
    }
    text, finished = "", False
    last = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            seen.errors.append(f"{reply.status_code}: {(await reply.aread()).decode()[:200]}")
            return
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            if not stop.is_set() and now - last > seen.longest_gap_s:
                seen.longest_gap_s, seen.gap_at_s = now - last, now - seen.began
            last = now
            if line == "data: [DONE]":
                finished = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                seen.errors.append(str(chunk["error"]))
                return
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            seen.tokens += 1
    if not finished:
        seen.errors.append("the stream broke off")
    seen.texts.add(text)
    seen.answers += 1


async def _go_on(base: str, number: int, seen: Seen, stop: asyncio.Event) -> None:
    async with httpx.AsyncClient(base_url=base, headers=HEADERS, timeout=120) as client:
        while not stop.is_set():
            try:
                await _ask(client, number, seen, stop)
            except httpx.HTTPError as error:
                seen.errors.append(repr(error))


@asynccontextmanager
async def well_behaved(base: str, clients: int) -> AsyncIterator[list[Seen]]:
    """So many clients ask while the body runs; their last answers are complete when this ends."""
    stop, seen = asyncio.Event(), [Seen() for _ in range(clients)]
    tasks = [asyncio.create_task(_go_on(base, number, one, stop)) for number, one in enumerate(seen)]
    try:
        while not all(one.tokens for one in seen):
            await asyncio.sleep(0.05)
        for one in seen:
            one.longest_gap_s = 0.0
        yield seen
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def _main(base: str, clients: int) -> None:
    """In a process of its own, so that no attacker's work counts as a gap. Ends when its standard input does."""
    async with well_behaved(base, clients) as seen:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    report = [{**vars(one), "texts": len(one.texts)} for one in seen]
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
