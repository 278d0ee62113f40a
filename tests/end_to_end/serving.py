"""`engine-serve` as a subprocess for tests, on a free port."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx


def free_port() -> int:
    """Nobody has it now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(*arguments: str, start_timeout_s: float = 180.0) -> Iterator[str]:
    """Yields the base URL of a ready server; the server is gone afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "entrypoints.serve", "--port", str(port), *arguments]
    server = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + start_timeout_s
        while True:
            assert server.poll() is None, f"the server exited with {server.returncode}"
            assert time.monotonic() < deadline, "the server was not ready in time"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                    break
            time.sleep(0.1)
        yield base
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            raise


def metric(base: str, name: str) -> float:
    """The value of an unlabelled or model-labelled metric."""
    text = httpx.get(f"{base}/metrics", timeout=60).text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.MULTILINE)
    assert found, f"no metric {name} in:\n{text}"
    return float(found.group(1))
