"""An OpenAI-compatible server under more than it can serve, where an answer is worth something within a deadline only.

What it can serve is found first (`--clients` that ask again and again, at first without a deadline: whatever a server
does for the first time is done then), then it is asked at that pace, then at
`--times` as much for `--seconds`, at moments of a Poisson process. Every request says its deadline
(`x-request-timeout`), and its client leaves when it is over. Goodput is what ended within the deadline, a second; the
peak is the better of the first two. Prints JSON. Usage: ``python tools/bench_overload.py URL [--deadline 10]``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

import httpx

REFUSED = {429, 503}


@dataclass
class Seen:
    """What became of the requests that arrived."""

    asked: int = 0
    in_time_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    with_retry_after: int = 0
    late: int = 0
    """let in, and not answered within the deadline"""
    failed: Counter[str] = field(default_factory=Counter)


class Load:
    def __init__(self, options: argparse.Namespace, client: httpx.AsyncClient, model: str) -> None:
        self.options, self.client, self.model = options, client, model
        self.random = random.Random(options.seed)
        self.deadline: float | None = None

    def body(self) -> dict[str, object]:
        length = round(self.options.input_len * self.random.uniform(0.5, 1.5))
        prompt = [self.random.randrange(100, 20000) for _ in range(length)]
        tokens = round(self.options.output_len * self.random.uniform(0.5, 1.5))
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    async def ask(self, seen: Seen) -> None:
        began = time.perf_counter()
        url = self.options.url.rstrip("/") + "/v1/completions"
        seen.asked += 1
        headers = {} if self.deadline is None else {"x-request-timeout": str(self.deadline)}
        try:
            async with asyncio.timeout(self.deadline):
                reply = await self.client.post(url, json=self.body(), headers=headers)
        except TimeoutError:
            seen.late += 1
            return
        except httpx.HTTPError as error:
            seen.failed[type(error).__name__] += 1
            return
        took = time.perf_counter() - began
        if reply.status_code == 200:
            seen.in_time_s.append(took)
        elif reply.status_code in REFUSED:
            seen.refused_s.append(took)
            seen.with_retry_after += "retry-after" in reply.headers
        elif reply.status_code == 504:
            seen.late += 1
        else:
            seen.failed[f"HTTP {reply.status_code}: {reply.text[:100]}"] += 1

    async def closed(self, seconds: float) -> float:
        """Answers a second to clients that always wait for one."""
        until = time.perf_counter() + seconds

        async def client(seen: Seen) -> None:
            while time.perf_counter() < until:
                await self.ask(seen)

        began, seen = time.perf_counter(), Seen()
        await asyncio.gather(*(client(seen) for _ in range(self.options.clients)))
        if not seen.in_time_s:
            raise SystemExit(f"nothing was answered within the deadline: {seen}")
        return len(seen.in_time_s) / (time.perf_counter() - began)

    async def open(self, rate: float, seconds: float) -> Seen:
        """Poisson arrivals, whoever else is served."""
        seen, began, at = Seen(), time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as group:
            while (at := at + self.random.expovariate(rate)) < seconds:
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                group.create_task(self.ask(seen))
        return seen


def told(seen: Seen, rate: float, seconds: float) -> dict[str, object]:
    admitted = len(seen.in_time_s) + seen.late + sum(seen.failed.values())
    told: dict[str, object] = {
        "rate": round(rate, 2),
        "asked": seen.asked,
        "in_time": len(seen.in_time_s),
        "goodput": round(len(seen.in_time_s) / seconds, 3),
        "refused": len(seen.refused_s),
        "with_retry_after": seen.with_retry_after,
        "late": seen.late,
        "failed": dict(seen.failed),
        "admitted_in_time": round(len(seen.in_time_s) / admitted, 3) if admitted else None,
    }
    for name, values in (("refusal", seen.refused_s), ("answer", seen.in_time_s)):
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=100, method="inclusive")
            told |= {f"{name}_p50_s": round(cuts[49], 4), f"{name}_p99_s": round(cuts[98], 4)}
    return told


async def measure(options: argparse.Namespace) -> dict[str, object]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        models = (await client.get(options.url.rstrip("/") + "/v1/models")).raise_for_status().json()
        load = Load(options, client, models["data"][0]["id"])
        await load.closed(options.find_seconds / 3)
        load.deadline = options.deadline
        found = 0.0 if options.rate else await load.closed(options.find_seconds)
        rate = options.rate or found
        peak = await load.open(rate, options.peak_seconds)
        await asyncio.sleep(2.0)
        over = await load.open(rate * options.times, options.seconds)
    at_peak = told(peak, rate, options.peak_seconds)
    beyond = told(over, rate * options.times, options.seconds)
    best = max(found, len(peak.in_time_s) / options.peak_seconds)
    ratio = len(over.in_time_s) / options.seconds / best
    return {"peak": at_peak, "overload": beyond, "goodput_of_peak": round(ratio, 3)}


@dataclass(frozen=True)
class Defaults:
    deadline: float = 10.0
    times: float = 4.0
    seconds: float = 300.0
    find_seconds: float = 30.0
    peak_seconds: float = 60.0
    clients: int = 64
    input_len: int = 128
    output_len: int = 64
    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL", help="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, help="what it can serve, requests a second, where that is known")
    for name, value in asdict(Defaults()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
