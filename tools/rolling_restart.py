"""A rolling restart under load: how many requests fail?

    python tools/rolling_restart.py MODEL [--requests 2000] [--at-once 16] [--drain-delay 0.5] [-- MORE OF engine-serve]

Two servers stand behind a balancer that asks each for `/ready` ten times a second, sends to those that said yes, and
tries nothing twice. While requests come, half of them streamed, one server after the other is ended by SIGTERM and
started again, until the requests are through. A request fails that is not answered with all of its tokens. Prints of
each end how long `/ready` took to say no, how long the server took to end, and its status; the last line is JSON.
Exits 1 if a request failed, a server did not end with 0, or none was restarted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

LOOKS_S = 0.1
START_S, END_S = 120.0, 120.0
TOKENS = 24


@dataclass
class Server:
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    url: str = ""
    ready: bool = False

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*self.command, "--port", str(port)], stderr=subprocess.DEVNULL)


@dataclass(frozen=True)
class End:
    noticed_ms: float
    """from the signal until a new connection is told so by `/ready`"""
    took_s: float
    status: int


@dataclass
class Restarts:
    servers: list[Server]
    client: httpx.AsyncClient
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    over: bool = False
    _turn: int = 0

    async def look(self) -> None:
        """The balancer's view, which is up to `LOOKS_S` old."""
        while True:
            for server in self.servers:
                server.ready = await self._says_ready(server)
            await asyncio.sleep(LOOKS_S)

    async def _says_ready(self, server: Server) -> bool:
        try:
            return (await self.client.get(f"{server.url}/ready", timeout=1.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def someone(self) -> Server:
        while not (ready := [server for server in self.servers if server.ready]):
            await asyncio.sleep(0.01)
        self._turn += 1
        return ready[self._turn % len(ready)]

    async def ask(self, number: int) -> None:
        server = await self.someone()
        body = {"prompt": f"Story {number}:", "max_tokens": TOKENS, "ignore_eos": True, "stream": number % 2 == 1}
        body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        try:
            reply = await self.client.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
            reply.raise_for_status()
            text = reply.text
            if body["stream"]:
                events = [line.removeprefix("data: ") for line in text.splitlines() if line]
                assert events[-1:] == ["[DONE]"], events[-1:]
                text = events[-2]
            assert json.loads(text)["usage"]["completion_tokens"] == TOKENS, text
            self.answered += 1
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
            self.failures.append(f"request {number} to {server.url}: {type(error).__name__}: {error}")

    async def restart_in_turn(self) -> None:
        for turn in range(1 << 30):
            server, other = self.servers[turn % 2], self.servers[1 - turn % 2]
            while not (server.ready and other.ready) and not self.over:
                await asyncio.sleep(0.01)
            if self.over:
                return
            self.ends.append(await self.end(server))
            server.start()

    async def end(self, server: Server) -> End:
        assert server.process is not None
        process, started = server.process, time.perf_counter()
        process.send_signal(signal.SIGTERM)
        while await self._says_ready(server):
            await asyncio.sleep(0.002)
        noticed = time.perf_counter() - started
        status = await asyncio.to_thread(process.wait, END_S)
        return End(1e3 * noticed, time.perf_counter() - started, status)


async def run(options: argparse.Namespace) -> Restarts:
    serve = [str(Path(sys.executable).with_name("engine-serve")), options.model, "--log-level", "error"]
    command = [*serve, "--drain-delay", str(options.drain_delay), *options.options]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # each on a connection of its own
    async with httpx.AsyncClient(limits=limits) as client:
        restarts = Restarts([Server(command), Server(command)], client)
        for server in restarts.servers:
            server.start()
        looking = asyncio.create_task(restarts.look())
        try:
            async with asyncio.timeout(START_S):
                while not all(server.ready for server in restarts.servers):
                    await asyncio.sleep(0.05)
            restarting = asyncio.create_task(restarts.restart_in_turn())
            numbers = iter(range(options.requests))

            async def asks() -> None:
                for number in numbers:
                    await restarts.ask(number)

            await asyncio.gather(*(asks() for _ in range(options.at_once)))
            restarts.over = True
            async with asyncio.timeout(END_S + START_S):  # what was started last serves, too
                await restarting
                while not all(server.ready for server in restarts.servers):
                    await asyncio.sleep(0.05)
        finally:
            looking.cancel()
            for server in restarts.servers:
                if server.process is not None:
                    server.process.kill()
                    server.process.wait()
        return restarts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--drain-delay", type=float, default=0.5)
    own = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:own])
    options.options = sys.argv[own + 1 :]
    restarts = asyncio.run(run(options))
    for end in restarts.ends:
        print(f"/ready said no after {end.noticed_ms:.0f} ms; ended after {end.took_s:.2f} s with {end.status}")
    print("\n".join(restarts.failures[:20]))
    noticed = max((end.noticed_ms for end in restarts.ends), default=0.0)
    summary = {"answered": restarts.answered, "failed": len(restarts.failures), "restarts": len(restarts.ends)}
    print(json.dumps({**summary, "ready_says_no_ms": round(noticed, 1)}))
    return int(bool(restarts.failures) or not restarts.ends or any(end.status for end in restarts.ends))


if __name__ == "__main__":
    sys.exit(main())
