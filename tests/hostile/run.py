"""Everything hostile at once against one server, while well-behaved clients ask: `python tests/hostile/run.py`.

Prints a line for each attack, then what the well-behaved saw, and as the last line all of it as JSON. `test_hostile`
runs the same in small, and whole with --exhaustive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import zmq
from connections import allow_descriptors, huge_body, silent, slow_headers
from frames import damaged_frames
from hostile_requests import CASES, CHAT, looping
from server import KEY, HostileServer, hostile_server

from attention_backends.native_build import cpu_isas

HEADERS = {"Authorization": f"bearer {KEY}"}


@dataclass(frozen=True)
class Scale:
    clients: int = 8
    frames: int = 100_000
    silent: int = 5_000
    slow: int = 200
    bodies: int = 10
    body_bytes: int = 100 * 1024 * 1024
    loops: int = 20
    header_timeout_s: float = 20.0
    patience_s: float = 60.0
    """how long an attacker waits to be thrown out once he should have been: he may get little CPU himself"""
    priority: int = 19
    """of the attackers: they have machines of their own, so here they get what CPU the others leave"""
    only: str = ""
    """one attack by name; all where it is empty"""


# Beside other tests, on a busy machine: who attacks must not be starved until the server rightly gives him up.
SMALL = Scale(clients=2, frames=3_000, silent=200, slow=20, bodies=2, loops=3, header_timeout_s=8.0, priority=0)


@dataclass
class Report:
    attacks: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """answers that are not what they must be"""
    clients: list[dict[str, Any]] = field(default_factory=list)
    grown_mib: float = 0.0
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def client_errors(self) -> list[str]:
        return [error for client in self.clients for error in client["errors"]]

    @property
    def longest_gap_s(self) -> float:
        return max(float(client["longest_gap_s"]) for client in self.clients)


class Attack:
    def __init__(self, server: HostileServer, scale: Scale, report: Report) -> None:
        self.server, self.scale, self.report = server, scale, report
        url = httpx.URL(server.base)
        self.host, self.port = url.host, url.port or 80
        self._patience_s = scale.header_timeout_s + scale.patience_s

    async def cases(self) -> str:
        """One after the other over one connection, which every refusal must leave usable."""
        statuses: Counter[int] = Counter()
        took: dict[str, float] = {}
        async with httpx.AsyncClient(base_url=self.server.base, headers=HEADERS, timeout=120) as client:
            for case in CASES:
                content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
                began = time.monotonic()
                reply = await client.post(case.path, content=content, headers={"Content-Type": "application/json"})
                took[case.name] = round(time.monotonic() - began, 1)
                statuses[reply.status_code] += 1
                param = reply.json().get("error", {}).get("param") if reply.status_code >= 400 else None
                said = (reply.status_code, param if case.param is not None else None)
                if said != (case.status, case.param) or "Traceback" in reply.text:
                    self.report.wrong.append(f"{case.name}: {reply.status_code} {reply.text[:200]}")
        slowest = sorted(took, key=lambda name: -took[name])[:3]
        return f"{dict(statuses)}, the slowest {', '.join(f'{name} {took[name]} s' for name in slowest)}"

    async def frames(self) -> str:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.server.core_address)
            count = 0
            for frame in damaged_frames(self.scale.frames):
                while True:
                    try:
                        socket.send(frame, zmq.NOBLOCK)
                        break
                    except zmq.Again:
                        await asyncio.sleep(0.01)
                count += 1
                if count % 50 == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(2)
        return f"{count} sent"

    async def silent(self) -> str:
        number = allow_descriptors(self.scale.silent)
        closed = await silent(self.host, self.port, number, self._patience_s)
        if closed < number:
            self.report.wrong.append(f"{number - closed} of {number} silent connections survived")
        return f"{closed} of {number} closed"

    async def slow(self) -> str:
        ended = await slow_headers(self.host, self.port, self.scale.slow, self._patience_s)
        if ended < self.scale.slow:
            self.report.wrong.append(f"{self.scale.slow - ended} slow requests survived")
        return f"{ended} of {self.scale.slow} ended"

    async def bodies(self) -> str:
        statuses = [
            await huge_body(self.host, self.port, self.scale.body_bytes, chunked=bool(number % 2))
            for number in range(self.scale.bodies)
        ]
        if set(statuses) != {413}:
            self.report.wrong.append(f"huge bodies were answered {statuses}")
        return str(dict(Counter(statuses)))

    async def loops(self) -> str:
        async with httpx.AsyncClient(base_url=self.server.base, headers=HEADERS, timeout=120) as client:
            replies = await asyncio.gather(
                *(client.post(CHAT, json=looping(number)) for number in range(self.scale.loops))
            )
        statuses = Counter(reply.status_code for reply in replies)
        if set(statuses) != {400}:
            self.report.wrong.append(f"looping templates: {dict(statuses)} {replies[0].text[:200]}")
        return str(dict(statuses))

    async def doors(self) -> str:
        """Without the key, with a wrong one, from a strange host."""
        async with httpx.AsyncClient(base_url=self.server.base, timeout=60) as client:
            paths = (await client.get("/openapi.json", headers=HEADERS)).json()["paths"]
            guarded = [path for path in paths if path not in ("/live", "/ready", "/health", "/ping")]
            for path in [*guarded, "/metrics", "/openapi.json", "/docs"]:
                for method in ("GET", "POST"):
                    reply = await client.request(method, path)
                    if reply.status_code != 401:
                        self.report.wrong.append(f"{method} {path} without a key: {reply.status_code}")
            wrong = await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
            strange = await client.get("/v1/models/", headers={**HEADERS, "Host": "evil.example"})
            if wrong.status_code != 401 or "evil.example" in str(strange.headers) + strange.text:
                self.report.wrong.append("a wrong key is taken, or the host is reflected")
        if KEY in self.server.command_line:
            self.report.wrong.append("the key is in the list of processes")
        return f"{len(guarded)} routes guarded"

    async def leavers(self) -> str:
        """Clients that are gone before their answer, in every phase."""
        async with httpx.AsyncClient(base_url=self.server.base, headers=HEADERS, timeout=30) as client:
            for place in range(40):
                body = {"prompt": "x " * 300, "max_tokens": 500, "n": 4, "stream": place % 2 == 0}
                try:
                    path = "/v1/completions" if place % 4 else "/v1/prefixes"
                    await asyncio.wait_for(
                        client.post(path, json=body if place % 4 else {"name": f"p{place}", "prompt": "y " * 900}),
                        0.02 * (place % 7) + 0.01,
                    )
                except (TimeoutError, httpx.HTTPError):
                    pass
        return "40 left"

    async def all_at_once(self) -> None:
        attacks: list[Callable[[], Awaitable[str]]] = [
            self.cases, self.frames, self.silent, self.slow, self.bodies, self.loops, self.doors, self.leavers,
        ]  # fmt: skip
        wanted = [attack for attack in attacks if self.scale.only in ("", getattr(attack, "__name__", ""))]
        await asyncio.gather(*(self._one(attack) for attack in wanted))

    async def _one(self, attack: Callable[[], Awaitable[str]]) -> None:
        name, began = getattr(attack, "__name__", "attack"), time.monotonic()
        try:
            said = await attack()
        except Exception as error:
            said = f"failed: {error!r}"
            self.report.wrong.append(f"{name} {said}")
        self.report.attacks[name] = said
        print(f"{name}: {said} ({time.monotonic() - began:.1f} s)", flush=True)


async def _measured(server: HostileServer, scale: Scale, report: Report) -> None:
    watcher = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("well_behaved.py")), server.base, str(scale.clients)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdin is not None and watcher.stdout is not None
    assert (await asyncio.to_thread(watcher.stdout.readline)).strip() == "ready"
    before, done, most = server.resident_bytes, asyncio.Event(), 0

    async def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, server.resident_bytes)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    os.setpriority(os.PRIO_PROCESS, 0, scale.priority)
    await Attack(server, scale, report).all_at_once()
    done.set()
    await watching
    watcher.stdin.close()
    report.clients = json.loads(await asyncio.to_thread(watcher.stdout.readline))
    watcher.wait()
    report.grown_mib = (most - before) / 2**20


def run(scale: Scale, directory: Path) -> Report:
    """The server's log is printed where it is needed to understand what went wrong."""
    report, began = Report(), time.monotonic()
    # Answers are to be the same beside whatever others send; tiles of AMX add by how many rows there are.
    fixed = ("--quantization", "none", "--batch-invariant") if "amx" in (cpu_isas() or ()) else ()
    with hostile_server(directory, "--limit", f"header_timeout_s={scale.header_timeout_s}", *fixed) as server:
        asyncio.run(_measured(server, scale, report))
        server.process.send_signal(signal.SIGTERM)
        report.exit_code = server.process.wait(60)
        if report.wrong or report.client_errors or report.exit_code:
            print("\n".join(server.log[-60:]), file=sys.stderr)
    report.seconds = time.monotonic() - began
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", metavar="ATTACK", help="cases, frames, silent, slow, bodies, loops, …")
    options = parser.parse_args()
    scale = replace(SMALL if options.small else Scale(), only=options.only)
    with tempfile.TemporaryDirectory(prefix="h") as directory:
        report = run(scale, Path(directory))
    for client in report.clients:
        print(f"client: {client}")
    for wrong in report.wrong:
        print(f"wrong: {wrong}")
    print(f"front end grew by {report.grown_mib:.0f} MiB, longest gap {report.longest_gap_s:.2f} s")
    print(json.dumps(asdict(report)))
    good = not report.wrong and not report.client_errors and report.exit_code == 0
    return 0 if good and report.grown_mib < 200 and report.longest_gap_s < 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
