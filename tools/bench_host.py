"""What everything around the computation costs: a step's host time by part, the gap between steps, the front end's CPU
time per streamed token, and what an idle engine uses.

The core is real (process, sockets, scheduler, runner, sampler) but for the model, which is a stand-in: a few hundred
library calls that keep the compute threads busy for `--compute-ms` and give the same logits every time. So whatever a
step takes beyond them is the host's. The server is real too: its own process, and `--streams` clients in this one.
Beside what a token costs it stands what it costs an application that only sends (`bare_server.py`): the floor.

Prints tables, and JSON as the last line. Usage: ``python tools/bench_host.py [--tokenizer DIR] [--skip server]``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from stand_in_core import HIDDEN, REPORT

from engine.config import EngineArgs, EngineConfig
from engine.core.client import ProcessClient
from engine.core.wire import AddRequest, ToCore
from engine.frontend.demo import demo_model_path
from engine.replicas.client import ReplicatedClient
from engine.resolve import resolve_here
from engine.step import RowParams

EXECUTOR = "stand_in_core:timed_executor"
IDLE_S = 10.0
PROMPT = 8


def measure_steps(model: str, batch: int, steps: int, compute_ms: float, threads: int, parts: bool) -> dict[str, Any]:
    """A steady batch of decoding sequences through a core process; microseconds, medians."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"batch": batch, "steps": steps, "compute_s": compute_ms / 1e3, "threads": threads, "parts": parts}
        (Path(folder) / "settings.json").write_text(json.dumps(settings))
        args = EngineArgs(
            model=model,
            device="cpu",
            dtype="float32",
            max_model_len=1024,
            kv_cache_memory=1 << 30,
            compile="none",
            max_num_seqs=128,
            cache_dir=folder,
            threads=threads,
            async_scheduling=None,
        )
        client = ProcessClient(resolve_here(args)[1], executor=EXECUTOR)
        try:
            client.start()
            for index in range(batch):
                client.send(_request(index, steps + batch + 10))
            report = Path(folder) / REPORT
            while not report.exists():
                client.recv()
            time.sleep(0.2)
            measured = json.loads(report.read_text())
        finally:
            client.close()
    return _summary(measured, batch)


def _request(index: int, max_tokens: int) -> ToCore:
    # Prompts differ from their first token on, so that no prefix is shared.
    return AddRequest(
        request_id=f"r{index}",
        prompt_token_ids=[index + 1] * PROMPT,
        params=RowParams(seed=index, temperature=0.0),
        max_tokens=max_tokens,
    )


def _summary(measured: dict[str, Any], batch: int) -> dict[str, Any]:
    steps = measured["steps"]
    us = 1e6

    def median(values: list[float]) -> float:
        return round(us * statistics.median(values), 1)

    pairs = list(pairwise(steps))
    wall = [after[0] - before[0] for before, after in pairs]
    compute = [s[2] - s[1] for s in steps]
    return {
        "batch": batch,
        "step_us": median(wall),
        "compute_us": median(compute),
        "execute_outside_compute_us": median([s[4] - s[0] - (s[2] - s[1]) for s in steps]),
        "of_that_sampling_us": median([s[3] - s[2] for s in steps]),
        "handover_us": median([after[0] - before[4] for before, after in pairs]),
        "gap_us": median([after[1] - before[2] for before, after in pairs]),
        "gap_p90_us": round(us * sorted(after[1] - before[2] for before, after in pairs)[len(pairs) * 9 // 10], 1),
        "cpu_us_per_step": round(us * measured["cpu_s_per_step"], 1),
        "parts_us": {part: median(spent) for part, spent in measured["parts"].items() if spent},
    }


# -- the server --------------------------------------------------------------------------------------------------------


FRONTS = {
    "": "requests end with their core, and everybody may ask",
    "_resumed": "they would survive it",
    "_keyed": "and each is somebody's, whose use of it is logged",
}
"""suffix of figures → what a front end does for them"""
KEY = "a-key-of-nobody"


def serve(model: str, tokenizer: str, port: int, folder: str, reading: bool, front: str) -> None:
    """The server process: everything but the model is what `engine-serve` runs."""
    from engine import AsyncEngine
    from entrypoints.serve import build_parser
    from entrypoints.server.run import listen, run_loop, serve_engine

    args = EngineArgs(
        model=model,
        tokenizer=tokenizer,
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory=1 << 30,
        compile="none",
        cache_dir=folder,
        served_model_name="stand-in",
    )

    def alone(config: EngineConfig, cpus: object = None, group_fd: object = None) -> ProcessClient:
        return ProcessClient(config, executor=EXECUTOR)

    engine = AsyncEngine(args, client_factory=(lambda c: ReplicatedClient(c, alone)) if front else alone)
    chosen = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"] if reading else []
    if front == "_keyed":
        keys = Path(folder) / "keys.toml"
        hashed = hashlib.sha256(KEY.encode()).hexdigest()
        keys.write_text(f'[[keys]]\nname = "nobody"\nsha256 = "{hashed}"\ntokens_per_minute = 1000000000\n')
        chosen += ["--keys", str(keys), "--usage-log", str(Path(folder) / "usage.jsonl")]
    options = build_parser().parse_args(["x", "--log-level", "warning", *chosen])
    raise SystemExit(run_loop(serve_engine(engine, listen("127.0.0.1", port), options)))


async def _stream(port: int, path: str, body: dict[str, Any]) -> int:
    """Read one stream as cheaply as Python can; the number of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode() + data)
    events = 0
    tail = b""
    while b"[DONE]" not in tail:
        chunk = await reader.read(65536)
        if not chunk:
            raise RuntimeError(f"the server broke off: {tail.decode()}")
        events += chunk.count(b"data: ")
        tail = (tail + chunk)[-512:]
    writer.close()
    return events


_TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"text": {"type": "string"}}}}}


async def _load(port: int, streams: int, tokens: int, chat: bool, reading: bool) -> int:
    common = {"model": "stand-in", "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
    if chat and reading:
        common["tools"] = [_TOOL]
    if chat:
        path, bodies = (
            "/v1/chat/completions",
            [
                common | {"messages": [{"role": "user", "content": f"{i} says hello to the world"}]}
                for i in range(streams)
            ],
        )
    else:
        path, bodies = "/v1/completions", [common | {"prompt": f"{i} says hello to the world"} for i in range(streams)]
    return sum(await asyncio.gather(*(_stream(port, path, body) for body in bodies)))


def _cpu_s(process: psutil.Process) -> tuple[float, float]:
    """In all, and of it in the kernel."""
    times = process.cpu_times()
    return float(times.user + times.system), float(times.system)


def measure_server(
    model: str, tokenizer: str, streams: int, tokens: int, compute_ms: float, threads: int, reading: bool, front: str
) -> dict[str, Any]:
    """CPU time of the front-end process per streamed token, then of all its processes while nothing is asked.
    `reading`: it looks for thinking and for calls of a tool in what chats are answered."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"batch": 0, "steps": 0, "compute_s": compute_ms / 1e3, "threads": threads, "parts": False}
        (Path(folder) / "settings.json").write_text(json.dumps(settings))
        port = _free_port()
        command = [sys.executable, __file__, "--serve", str(port), "--tokenizer", tokenizer, "--folder", folder]
        command += [f"--front={front}", *(["--reading"] if reading else [])]
        server = subprocess.Popen([*command, "--model", model])
        try:
            _await_server(server, port)
            process = psutil.Process(server.pid)
            core = max(process.children(), key=lambda child: child.memory_info().rss)  # helpers are small
            figures: dict[str, Any] = {"streams": streams}
            for name, chat in (("completions", False), ("chat", True)):
                asyncio.run(_load(port, streams, 16, chat, reading))
                before = _cpu_s(process)
                events = asyncio.run(_load(port, streams, tokens, chat, reading))
                whole, kernel = (1e6 * (now - then) / events for now, then in zip(_cpu_s(process), before))
                figures[f"front_end_us_per_token_{name}{front}"] = round(whole, 1)
                figures[f"front_end_us_per_token_{name}{front}_kernel"] = round(kernel, 1)
            if front:
                return figures
            time.sleep(1.0)
            before_idle = [_cpu_s(process)[0], _cpu_s(core)[0]]
            switches = [_wake_ups(process), _wake_ups(core)]
            time.sleep(IDLE_S)
            for i, (name, each) in enumerate((("front_end", process), ("core", core))):
                figures[f"idle_{name}_percent"] = round(100 * (_cpu_s(each)[0] - before_idle[i]) / IDLE_S, 2)
                figures[f"idle_{name}_wake_ups_per_s"] = round((_wake_ups(each) - switches[i]) / IDLE_S, 1)
            return figures
        finally:
            server.terminate()
            server.wait()


def measure_floor(streams: int, tokens: int, compute_ms: float, threads: int) -> float:
    """CPU time of a server that only sends, per event; microseconds."""
    tool = [sys.executable, str(Path(__file__).with_name("bare_server.py"))]
    port = _free_port()
    server = subprocess.Popen([*tool, "serve", str(port), str(compute_ms)])
    computing = subprocess.Popen([*tool, "compute", str(compute_ms), str(threads)])
    try:
        _await_server(server, port)
        process = psutil.Process(server.pid)
        asyncio.run(_load(port, streams, 64, True, False))
        before = _cpu_s(process)[0]
        events = asyncio.run(_load(port, streams, tokens, True, False))
        return 1e6 * (_cpu_s(process)[0] - before) / events
    finally:
        for each in (server, computing):
            each.terminate()
            each.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _await_server(server: subprocess.Popen[bytes], port: int) -> None:
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            return
        except httpx.HTTPError:
            if server.poll() is not None:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.2)


def _wake_ups(process: psutil.Process) -> int:
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face directory; only its config is read")
    parser.add_argument("--tokenizer", help="directory or GGUF file; default: the demo model's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream")
    parser.add_argument("--compute-ms", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--skip", nargs="*", default=[], choices=["steps", "server"])
    parser.add_argument("--reading", action="store_true", help="chats bring a tool, and thinking is looked for")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--front", default="", choices=list(FRONTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.tokenizer, options.serve, options.folder, options.reading, options.front)
    tokenizer = options.tokenizer or demo_model_path()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _write_model(Path(folder))
        figures: dict[str, Any] = {}
        if "steps" not in options.skip:
            for batch in options.batch:
                alone = measure_steps(model, batch, options.steps, 0.0, options.threads, False)
                steps = measure_steps(model, batch, options.steps, options.compute_ms, options.threads, False)
                parts = measure_steps(model, batch, options.steps, 0.0, options.threads, True)["parts_us"]
                figures[f"batch_{batch}"] = {"without_compute": alone, "beside_compute": steps, "parts_us": parts}
                _show(batch, alone, steps, parts)
        if "server" not in options.skip:
            load = (options.streams, options.tokens, options.compute_ms, options.threads)
            server: dict[str, Any] = {}
            for front in FRONTS:
                server |= measure_server(model, tokenizer, *load, options.reading, front)
            floor = measure_floor(*load)
            server["floor_us_per_token"] = round(floor, 1)
            figures["server"] = server
            print("\n".join(f"{name:36} {value}" for name, value in server.items()))
    print(json.dumps(figures))


def _show(batch: int, alone: dict[str, Any], steps: dict[str, Any], parts: dict[str, float]) -> None:
    print(f"batch {batch}: a step without a model takes {alone['step_us']} us; beside one the gap between")
    print(f"  computations is {steps['gap_us']} us (p90 {steps['gap_p90_us']})")
    for part, value in parts.items():
        print(f"  {part:28} {value:8.1f} us")


def _write_model(folder: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


if __name__ == "__main__":
    main()
