"""`engine-serve` on the device, in a process of its own, asked over HTTP: what a client gets, and how fast."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.context import ROOT, Context, UnavailableError
from gpu.machine import missing
from gpu.models import save_tiny, shape_directory

NEEDED = ("fastapi", "uvicorn", "httpx", "pydantic", "jsonschema", "llguidance")
READY_S = 120.0
ON_DEVICE = ("--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "cuda")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
LOAD = ("--num-prompts", "96", "--input-len", "512", "--output-len", "128", "--request-rate", "24", "--no-progress")
"""of the measurement: an open loop"""
DRY_LOAD = ("--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--request-rate", "24", "--no-progress")


def _door(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; from entrypoints.start import {name}; sys.exit({name}())", *arguments]


def _environment(context: Context) -> dict[str, str]:
    """A source tree that was not installed has no metadata, and the server tells its version."""
    facts = context.scratch / "metadata" / "pageloom-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pageloom\nVersion: 0\n")
    paths = [str(ROOT), os.environ.get("PYTHONPATH", ""), str(facts.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


@contextlib.contextmanager
def served(context: Context, model: Path, *options: str) -> Iterator[str]:
    """Its base URL, once it is healthy. Raises UnavailableError where packages are missing, RuntimeError where it does
    not start."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = _door("serve", str(model), "--port", str(port), "--cache-dir", str(context.cache_dir), *options)
    server = subprocess.Popen(command, cwd=context.scratch, env=_environment(context))
    base = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + min(READY_S, context.left_s())
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"engine-serve ended with status {server.returncode} before it was ready")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{base}/health", timeout=2).status_code == 200:
                    break
            if time.monotonic() > end:
                raise RuntimeError("engine-serve was not ready in time")
            time.sleep(0.1)
        yield base
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def _look(context: Context) -> None:
    if context.dry:  # its processes would not be on the pretend GPU
        raise UnavailableError("a dry run has no server")
    if lacking := missing(NEEDED):
        raise UnavailableError(f"not installed: {', '.join(lacking)}")


def run_server(context: Context) -> None:
    """Part `server`."""
    _look(context)
    path = context.scratch / "Qwen3"
    save_tiny("Qwen3", path)
    options = [*ON_DEVICE, "--max-model-len", "1024", "--max-num-seqs", "32", "--kv-cache-memory", str(1 << 30)]
    with served(context, path, *options) as base:
        for name, problem in _answers(base):
            context.check(f"server: {name}", problem)


def _answers(base: str) -> Iterator[tuple[str, str | None]]:
    """Name of a check, and what is wrong."""
    import httpx

    with httpx.Client(base_url=base, timeout=60) as client:

        def ask(**body: Any) -> Any:
            reply = client.post("/v1/completions", json={"model": "Qwen3", "temperature": 0, **body})
            return reply.json() | {"status": reply.status_code}

        models = client.get("/v1/models").json()["data"]
        name = models[0]["id"]
        plain = {"model": name, "max_tokens": 24, "ignore_eos": True}
        prompts = [[5 + (7 * i + j) % 400 for j in range(3 + 11 * i)] for i in range(24)]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda prompt: ask(prompt=prompt, **plain), prompts))
        counts = [a.get("usage", {}).get("completion_tokens") for a in answers]
        yield "24 at once", None if counts == [24] * 24 else f"completion tokens {counts}: {answers[0]}"
        one = ask(prompt=prompts[3], **plain)
        again = ask(prompt=prompts[3], **plain)
        same = one["choices"][0]["text"] == again["choices"][0]["text"]
        yield "a prefix hit repeats the answer", None if same else f"{one['choices']} != {again['choices']}"
        drawn = ask(prompt=prompts[2], **(plain | {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2}))
        texts = len({c["text"] for c in drawn.get("choices", [])})
        yield "n = 3 with log-probabilities", None if texts == 3 else str(drawn)[:300]
        limits = {"max_tokens": 64, "ignore_eos": False}
        shaped = ask(prompt=prompts[1], **(plain | limits | {"structured_outputs": {"json": SCHEMA}}))
        yield "a JSON schema", _not_of_schema(shaped)
        with client.stream("POST", "/v1/completions", json={**plain, "prompt": prompts[0], "stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data:")]
        yield "a stream ends", None if lines and lines[-1].endswith("[DONE]") else str(lines[-2:])
        refused = ask(prompt=[1] * 2000, **plain)
        yield "too long a prompt is refused", None if refused["status"] == 400 else str(refused)[:300]


def _not_of_schema(answer: Any) -> str | None:
    choice = answer.get("choices", [{}])[0]
    if choice.get("finish_reason") != "stop":
        return None if choice.get("text", "").lstrip().startswith("{") else str(answer)[:300]
    try:
        value = json.loads(choice["text"])
    except ValueError:
        return f"{choice['text']!r} is no JSON"
    return None if isinstance(value.get("a"), int) and value["a"] <= 99 else str(value)


def run_load(context: Context) -> None:
    """Part `server-0.6b`: `engine-bench serve` on random weights."""
    _look(context)
    model = shape_directory("qwen3-0.6b", context.scratch, context.dry)
    options = [*ON_DEVICE, "--load-format", "dummy", "--max-model-len", "4096", "--max-num-seqs", "256"]
    options += ["--max-num-batched-tokens", "8192"]
    with served(context, model, *options) as base:
        command = _door("bench", "serve", "--base-url", base, *(DRY_LOAD if context.dry else LOAD))
        done = subprocess.run(
            command, env=_environment(context), capture_output=True, text=True, timeout=max(1.0, context.left_s())
        )
    if done.returncode != 0:
        context.check("engine-bench serve", (done.stdout + done.stderr)[-2000:])
        return
    context.check("engine-bench serve", None)
    context.figure("serve", {"load": " ".join(LOAD)} | json.loads(done.stdout.strip().splitlines()[-1]))
