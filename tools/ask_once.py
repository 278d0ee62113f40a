"""Starts `engine-serve` on a free port, asks one question over HTTP, prints the answer (tools/quickstart --check)."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

QUESTION = "What is the capital of France? Answer in one sentence."


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until_healthy(server: subprocess.Popen[bytes], base: str, timeout_s: float) -> float:
    """Seconds until /health answered 200; raises RuntimeError when the server exits or the time is up."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        if server.poll() is not None:
            raise RuntimeError(f"engine-serve exited with status {server.returncode} before it was ready")
        try:
            if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                return time.monotonic() - start
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"engine-serve was not ready within {timeout_s:.0f} s")


def main(argv: list[str]) -> int:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    serve = Path(sys.executable).with_name("engine-serve")
    server = subprocess.Popen([str(serve), "--host", "127.0.0.1", "--port", str(port), *argv])
    try:
        ready_s = wait_until_healthy(server, base, timeout_s=300)
        start = time.monotonic()
        reply = httpx.post(
            f"{base}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0},
            timeout=120,
        )
        reply.raise_for_status()
        body = reply.json()
        print(f"Ready after {ready_s:.1f} s; answered in {time.monotonic() - start:.1f} s", file=sys.stderr)
        print(f"Q: {QUESTION}")
        print(f"A: {body['choices'][0]['message']['content'].strip()}")
        return 0
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
