"""How long a start takes: from `engine-serve` to the first token over HTTP, and until everything is compiled.

Each start is a fresh process. "cold" has an empty cache directory (kernels, pieces and the tokenizer are made anew),
"warm" the one that a start before it has filled. The file cache of the operating system is as it happens to be. While
pieces still compile, one request after another measures what a token takes then; compiling gives way to them. "cold,
quiet" is a start whose server has a first request and no other until all is compiled. Memory is the peak resident size
of the front end's and of the core's process until then.

Prints a table, and JSON as the last line.
Usage: ``python tools/bench_start.py [--cold 1] [--quiet 1] [--warm 3] [MODEL] [-- OPTIONS]`` (those of
`engine-serve`).
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

POLL_S = 0.02
LIMIT_S = 300.0
TOKENS = 16
STILL_COMPILING = "pageloom_compiling{"

Start = dict[str, float | None]


def main() -> int:
    own, _, passed = " ".join(sys.argv[1:]).partition("-- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--cold", type=int, default=1, help="starts with an empty cache directory")
    parser.add_argument("--warm", type=int, default=3, help="starts with the one that the last cold start filled")
    parser.add_argument("--quiet", type=int, default=1, help="cold starts without requests while pieces compile")
    args = parser.parse_args(own.split())
    options = passed.split() or ["--kv-cache-memory", "1GiB", "--device", "cpu"]
    found: dict[str, list[Start]] = {"cold": [], "cold, quiet": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="bench-start-") as folder:
        for index in range(args.quiet):
            start = one_start(args.model, Path(folder) / f"quiet-{index}", options, quiet=True)
            found["cold, quiet"].append(start)
        for index in range(max(1, args.cold)):
            cache = Path(folder) / f"cache-{index}"
            start = one_start(args.model, cache, options)
            if args.cold:
                found["cold"].append(start)
        found["warm"] = [one_start(args.model, cache, options) for _ in range(args.warm)]
    medians = {kind: median_of(starts) for kind, starts in found.items() if starts}
    for kind, figures in medians.items():
        print(f"{kind} ({len(found[kind])} starts)")
        for name, value in figures.items():
            print(f"  {name:28} {'-' if value is None else f'{value:.2f}'}")
    print(json.dumps({"options": options, "median": medians, "starts": found}))
    return 0


def one_start(model: str | None, cache: Path, options: list[str], quiet: bool = False) -> Start:
    """One server, from its start to its end. Raises RuntimeError when it dies or takes too long."""
    port = free_port()
    command = [sys.executable, "-m", "entrypoints.serve", *([model] if model else []), "--port", str(port)]
    command += ["--cache-dir", str(cache), *options]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            return measured(server, f"http://127.0.0.1:{port}", began, quiet)
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def measured(server: subprocess.Popen[bytes], url: str, began: float, quiet: bool) -> Start:
    eager: list[float] = []
    with httpx.Client(base_url=url, trust_env=False, timeout=LIMIT_S) as client:
        name = first_answer(server, client, began)
        ready = time.perf_counter() - began
        first, _ = token_times(client, name)
        first_token = ready + first
        while compiling(client):
            if quiet:
                time.sleep(10 * POLL_S)
            else:
                eager.append(token_times(client, name)[1])
            if time.perf_counter() - began > LIMIT_S:
                raise RuntimeError(f"not compiled within {LIMIT_S:.0f} s")
        compiled = time.perf_counter() - began
        steady = statistics.median(token_times(client, name)[1] for _ in range(3))
    core = max(psutil.Process(server.pid).children(), key=lambda child: child.memory_info().rss)
    return {
        "ready_s": ready,
        "first_token_s": first_token,
        "compiled_s": compiled,
        "eager_token_ms": 1e3 * statistics.median(eager) if eager else None,
        "eager_token_worst_ms": 1e3 * max(eager) if eager else None,
        "compiled_token_ms": 1e3 * steady,
        "front_end_peak_mib": peak_mib(server.pid),
        "core_peak_mib": peak_mib(core.pid),
    }


def first_answer(server: subprocess.Popen[bytes], client: httpx.Client, began: float) -> str:
    """Waits until the server answers; the model's name."""
    while time.perf_counter() - began < LIMIT_S:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            return str(client.get("/v1/models").raise_for_status().json()["data"][0]["id"])
        except httpx.TransportError:
            time.sleep(POLL_S)
    raise RuntimeError(f"no answer within {LIMIT_S:.0f} s")


def token_times(client: httpx.Client, model: str) -> tuple[float, float]:
    """Seconds to the first token of a short request, and between its tokens."""
    body = {"model": model, "prompt": "The quick brown fox", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    began = time.perf_counter()
    times = []
    with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
        response.raise_for_status()
        times = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


def compiling(client: httpx.Client) -> bool:
    lines = client.get("/metrics").text.splitlines()
    return any(line.startswith(STILL_COMPILING) and line.endswith(" 1.0") for line in lines)


def peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def median_of(starts: list[Start]) -> Start:
    found: Start = {}
    for name in starts[0]:
        values = [value for start in starts if (value := start[name]) is not None]
        found[name] = statistics.median(values) if values else None
    return found


if __name__ == "__main__":
    sys.exit(main())
