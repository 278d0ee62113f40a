"""What taking a prompt over from another engine costs, beside computing it.

Pages: one, and 16 MB, between two processes, over shared memory, TCP and (where it is installed) NIXL, in milliseconds
(the median of several; the host tier has been written to before), and what each says of a link, for `engine-bench
cluster`. With ``--prefill URL --decode URL``, servers that run: seconds until the decode server's first token for
prompts of that many tokens, taken over and computed there in turn. Prints JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import random
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import httpx
import numpy as np

from engine.kv_transfer import frames, reader
from engine.kv_transfer.exports import Exports
from engine.kv_transfer.interface import News
from engine.kv_transfer.memory import KVMemory, Pages
from engine.kv_transfer.nixl_agent import NixlAgent
from engine.kv_transfer.params import KVTransferParams
from engine.kv_transfer.staging import Staging, Stagings

SIZE, PARTS, ROUNDS = 16 << 20, 30, 15
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def memory(page_bytes: int) -> KVMemory:
    count = SIZE // page_bytes
    size = page_bytes // PARTS
    device, host = (
        Pages([np.random.default_rng(part).integers(0, 255, (count, size), dtype=np.uint8) for part in range(PARTS)])
        for _ in range(2)
    )
    return KVMemory(device, host, {"model": "bench"})


def nixl(name: str) -> NixlAgent | None:
    return None if importlib.util.find_spec("nixl") is None else NixlAgent(name, ("UCX",))


def source(pipe: Connection, page_bytes: int) -> None:
    exports = Exports("127.0.0.1", 0, 600.0, 10.0, _ignore, nixl("source"))
    exports.attach(memory(page_bytes))
    pages = {index.to_bytes(32, "little"): index for index in range(SIZE // page_bytes)}
    names = [exports.offer(index, pages) for index in range(8 * ROUNDS)]
    pipe.send((exports.engine_id, exports.port, names))
    pipe.recv()
    exports.close()


def _ignore(news: News) -> None:
    pass


def pages_ms(page_bytes: int) -> dict[str, dict[str, dict[str, float]]]:
    pipe, far = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=source, args=(far, page_bytes))
    process.start()
    engine_id, port, names = pipe.recv()
    agent, target = nixl("reader"), memory(page_bytes)
    found: dict[str, dict[str, dict[str, float]]] = {}
    counts = {"one page": 1, "16 MB": SIZE // page_bytes}
    local_name = frames.local_name
    for transport in ("shared memory", "TCP", *(("NIXL",) if agent else ())):
        found_by = nobody if transport == "TCP" else local_name
        setattr(reader, "local_name", found_by)  # noqa: B010  # where the reader looks for it
        stagings = Stagings(2, agent.memory) if agent and transport == "NIXL" else Stagings(2, Staging)
        found[transport] = {}
        for size, count in counts.items():
            pages = {index.to_bytes(32, "little"): index for index in range(count)}
            took: list[float] = []
            for _ in range(ROUNDS):
                params = KVTransferParams(
                    remote_engine_id=engine_id, remote_request_id=names.pop(), remote_host="127.0.0.1", remote_port=port
                )
                began = time.perf_counter()
                reader.fetch(params, pages, target, stagings, 10.0)
                took.append(1000 * (time.perf_counter() - began))
            found[transport][size] = {"p50": round(statistics.median(took), 2), "max": round(max(took), 2)}
        one, many = (found[transport][size]["p50"] for size in counts)
        per_s = (counts["16 MB"] - 1) * page_bytes / 1e6 / max((many - one) / 1e3, 1e-9)
        found[transport]["link"] = {"transfer_ms": one, "transfer_mb_per_s": round(per_s)}
    setattr(reader, "local_name", local_name)  # noqa: B010
    pipe.send(None)
    process.join()
    return found


def nobody(port: int) -> str:
    return f"\0nobody-{port}"


def first_token_s(asked: argparse.Namespace) -> dict[str, float]:
    rolls = random.Random(time.time())
    took: dict[str, list[float]] = {"prefill": [], "taken over": [], "computed": []}
    for index in range(2 * asked.rounds):
        prompt = [rolls.randrange(1000, 40000) for _ in range(asked.tokens)]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 1}
        kind = ("taken over", "computed")[index % 2]
        if kind == "taken over":
            began = time.perf_counter()
            answer = _post(asked.prefill, {**body, "kv_transfer_params": ASKED})
            took["prefill"].append(time.perf_counter() - began)
            body["kv_transfer_params"] = answer["kv_transfer_params"]
        began = time.perf_counter()
        answer = _post(asked.decode, body)
        took[kind].append(time.perf_counter() - began)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == ((asked.tokens - 1) // 16 * 16 if kind == "taken over" else 0)
    return {kind: round(statistics.median(each), 4) for kind, each in took.items()}


def _post(url: str, body: dict[str, object]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--prefill")
    parser.add_argument("--decode")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    page_bytes = 30 * 16 * 2 * 3 * 64 * 2  # SmolLM2-135M's, 16 tokens, float16
    told: dict[str, object] = {"bytes": SIZE, "page_bytes": page_bytes, "ms": pages_ms(page_bytes)}
    if asked.prefill and asked.decode:
        told |= {"tokens": asked.tokens, "first_token_s": first_token_s(asked)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
