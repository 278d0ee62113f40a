"""An OpenAI-compatible server under more than it can serve, where an answer is worth something within a deadline only.

What it can serve is found first (`--clients` that ask again and again, at first without a deadline: whatever a server
does for the first time is done then), then it is asked at that pace, then at
`--times` as much for `--seconds`, at moments of a Poisson process. Every request says its deadline
(`x-request-timeout`), and its client leaves when it is over. Goodput is what ended within the deadline, a second; the
peak is the better of the first two. Who is refused after more than a second was let in first: that counts as late.
Clients write to sockets themselves, a connection for each request: where they share the server's cores, a library would
take more of them than a refusal does. Prints JSON. Usage: ``python tools/bench_overload.py URL [--deadline 10]``.
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
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

REFUSED = {429, 503}
AT_ONCE_S = 1.0
"""in which one is refused that is not let in"""


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
    def __init__(self, options: argparse.Namespace, model: str) -> None:
        self.options, self.model = options, model
        self.random = random.Random(options.seed)
        self.deadline: float | None = None
        url = urlsplit(options.url)
        if url.scheme != "http" or url.path.strip("/"):
            raise SystemExit(f"{options.url}: http://HOST[:PORT] is wanted")
        self.host, self.port = url.hostname or "127.0.0.1", url.port or 80

    def request(self) -> bytes:
        length = round(self.options.input_len * self.random.uniform(0.5, 1.5))
        prompt = [self.random.randrange(100, 20000) for _ in range(length)]
        tokens = round(self.options.output_len * self.random.uniform(0.5, 1.5))
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked).encode()
        headers = f"host: {self.host}:{self.port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        if self.deadline is not None:
            headers += f"x-request-timeout: {self.deadline}\r\n"
        return f"POST /v1/completions HTTP/1.1\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body

    async def reply(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    async def ask(self, seen: Seen) -> None:
        request, began = self.request(), time.perf_counter()
        seen.asked += 1
        try:
            async with asyncio.timeout(self.deadline):
                reply = await self.reply(request)
        except TimeoutError:
            seen.late += 1
            return
        except OSError as error:
            seen.failed[type(error).__name__] += 1
            return
        took = time.perf_counter() - began
        head, _, body = reply.decode("utf-8", "replace").partition("\r\n\r\n")
        first, status = head.split(" ", 2), 0
        if first[0].startswith("HTTP/") and body.endswith("}"):  # else it broke off
            status = int(first[1])
        if status == 200:
            seen.in_time_s.append(took)
        elif status in REFUSED and took <= AT_ONCE_S:
            seen.refused_s.append(took)
            seen.with_retry_after += "\r\nretry-after:" in head.lower()
        elif status in {504, *REFUSED}:
            seen.late += 1
        else:
            seen.failed[f"HTTP {status}: {reply[-100:]!r}"] += 1

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
    with build_opener(ProxyHandler({})).open(options.url.rstrip("/") + "/v1/models") as models:
        load = Load(options, json.load(models)["data"][0]["id"])
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
