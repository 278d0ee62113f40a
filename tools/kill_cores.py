"""A server's core is killed while streams run. Of each stream: whether it ended, whether anything that it was given was
taken back, and whether it is what it is when nothing is killed; of each kill: how long nobody was given anything,
beside how long a core takes that is killed while nothing runs.

usage: python tools/kill_cores.py MODEL [--streams 64] [--kills 5] [--rounds 1] [--tokens 96] [--seed 1]
       [--serve "--dtype float32"]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0, "presence_penalty": 0.5},
    {"temperature": 1.0, "extra_body": {"structured_outputs": {"regex": "([a-f]{4} ){8,30}end"}}},
)
START_S = 300.0
MOST_RESTARTS = 100
IDLE = 2
"""kills while nothing runs"""


class Stream:
    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.logprobs = self.generated = 0
        self.longest_gap_s = 0.0
        self.failed = ""

    @property
    def told(self) -> tuple[Any, ...]:
        return self.texts, self.reasons, self.logprobs, self.generated


async def follow(client: AsyncOpenAI, index: int, tokens: int, stream: Stream) -> None:
    kind = KINDS[index % len(KINDS)]
    body = {"ignore_eos": "structured_outputs" not in kind.get("extra_body", {}), **kind.get("extra_body", {})}
    prompt = f"{index} ways to count the words of a story that nobody has told yet:" + " once more" * (index % 9)
    last = time.monotonic()
    try:
        chunks: Any = await client.completions.create(
            model="served",
            prompt=prompt,
            max_tokens=tokens,
            seed=index,
            stream=True,
            stream_options={"include_usage": True},
            **{**kind, "extra_body": body},
        )
        async for chunk in chunks:
            now = time.monotonic()
            stream.longest_gap_s, last = max(stream.longest_gap_s, now - last), now
            for choice in chunk.choices:
                stream.texts[choice.index] = stream.texts.get(choice.index, "") + choice.text
                if choice.logprobs is not None:
                    stream.logprobs += len(choice.logprobs.tokens or [])
                if choice.finish_reason is not None:
                    stream.reasons[choice.index] = choice.finish_reason
            if chunk.usage is not None:
                stream.generated = chunk.usage.completion_tokens
    except Exception as error:
        stream.failed = f"{type(error).__name__}: {error}"


def core_of(server: subprocess.Popen[bytes]) -> int | None:
    for child in psutil.Process(server.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("engine.core.process" in part for part in child.cmdline()):
                return int(child.pid)
    return None


def given(streams: list[Stream]) -> int:
    """Characters."""
    return sum(len(text) for each in streams for text in each.texts.values())


async def run(
    base: str, options: argparse.Namespace, server: subprocess.Popen[bytes], kills: list[int], gaps: list[float]
) -> list[Stream]:
    """`kills`: characters over all streams, behind each of which the core is killed. `gaps`: seconds from each kill to
    the next characters are put there."""
    streams = [Stream() for _ in range(options.streams)]
    async with AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=600) as client:
        tasks = [asyncio.create_task(follow(client, i, options.tokens, each)) for i, each in enumerate(streams)]
        for wanted in kills:
            while given(streams) < wanted and not all(task.done() for task in tasks):
                await asyncio.sleep(0.002)
            if (core := core_of(server)) is not None and not all(task.done() for task in tasks):
                os.kill(core, signal.SIGKILL)
                killed = time.monotonic()
                await asyncio.sleep(0.1)  # what it had sent before
                before = given(streams)
                while given(streams) == before and not all(task.done() for task in tasks):
                    await asyncio.sleep(0.002)
                gaps.append(time.monotonic() - killed)
        await asyncio.gather(*tasks)
    return streams


def serve(options: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "entrypoints.serve", options.model, "--port", str(port)]
    restarts = min(options.kills * options.rounds + IDLE + 3, MOST_RESTARTS)
    command += ["--served-model-name", "served", "--core-restarts", str(restarts)]
    server = subprocess.Popen([*command, *shlex.split(options.serve)])
    base, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{base}/ready", timeout=2).status_code == 200:
                return server, base
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def restart(server: subprocess.Popen[bytes], base: str) -> float:
    """Seconds until another core is ready, where the one that is killed had nothing to do."""
    core = core_of(server)
    assert core is not None
    os.kill(core, signal.SIGKILL)
    killed = time.monotonic()
    while core_of(server) in (None, core) or httpx.get(f"{base}/ready", timeout=30).status_code != 200:
        time.sleep(0.01)
    return time.monotonic() - killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="the same streams again, killed at other places")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", help="more options of engine-serve, in one argument")
    options = parser.parse_args()
    if options.kills * options.rounds + IDLE >= MOST_RESTARTS:
        parser.error(f"a server follows {MOST_RESTARTS} cores: fewer kills or rounds")
    server, base = serve(options)
    failed, gaps, differ, counts, longest = list[str](), list[float](), 0, 0, 0.0
    try:
        calm = asyncio.run(run(base, options, server, [], gaps))
        failed += [each.failed for each in calm if each.failed]
        length, random = given(calm), Random(options.seed)
        idle_s = [restart(server, base) for _ in range(IDLE)]
        for number in range(options.rounds):
            places = sorted(int(length * random.uniform(0.05, 0.9)) for _ in range(options.kills))
            found = asyncio.run(run(base, options, server, places, gaps))
            failed += [each.failed for each in found if each.failed]
            differ += sum(each.told != other.told for each, other in zip(calm, found, strict=True))
            counts += sum(each.generated != other.generated for each, other in zip(calm, found, strict=True))
            longest = max(longest, *(each.longest_gap_s for each in found))
            print(f"round {number}: {len(gaps)} kills, {len(failed)} failed, {differ} differ", flush=True)
        used = re.search(r"^pageloom_kv_cache_usage_ratio(?:{[^}]*})? (\S+)$", httpx.get(f"{base}/metrics").text, re.M)
    finally:
        server.terminate()
        server.wait()
    print(f"{len(gaps)} kills under {options.streams * options.rounds} streams")
    print(f"{len(failed)} streams failed {failed[:3]}; {counts} with another number of tokens; {differ} that differ")
    calmest = max(each.longest_gap_s for each in calm)
    print(f"longest gap of a stream {longest:.1f} s, undisturbed {calmest:.1f}")
    print(
        f"a core that is killed while nothing runs is followed within {', '.join(f'{each:.2f}' for each in idle_s)} s"
    )
    if gaps:
        most = sorted(gaps)[int(0.9 * len(gaps))]
        print(
            f"nothing came behind a kill for {statistics.median(gaps):.2f} s in the median, {most:.2f} in nine of ten, "
            f"{max(gaps):.2f} at most"
        )
    print(f"KV cache in use in the end: {used[1] if used else '?'}")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
