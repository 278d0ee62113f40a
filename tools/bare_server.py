"""What a streamed token costs at least, for `bench_host.py`: an application that only sends, on the same uvicorn and
uvloop, while another process computes as the stand-in core does.

Usage: ``bare_server.py serve PORT COMPUTE_MS`` or ``bare_server.py compute COMPUTE_MS THREADS``; both until they end.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

REST_S = 0.004
"""of a step, beside its computation"""
_CHUNK = {
    "id": "chatcmpl-" + "0" * 32,
    "created": 1790000000,
    "model": "stand-in",
    "choices": [{"index": 0, "delta": {"content": " hello"}, "logprobs": None, "finish_reason": None}],
    "object": "chat.completion.chunk",
    "system_fingerprint": "fp_0123456789",
    "usage": None,
}


class Bare:
    """All streams go on at once, once a step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._event = b"data: " + json.dumps(_CHUNK).encode() + b"\n\n"

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            ticking = asyncio.ensure_future(self._tick())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            ticking.cancel()
            return
        tokens = json.loads((await receive())["body"] or b"{}").get("max_tokens", 0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(tokens):
            news = asyncio.get_running_loop().create_future()
            self._waiting.append(news)
            await news
            await send({"type": "http.response.body", "body": self._event, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def compute(seconds: float, threads: int) -> None:
    """As `stand_in_core.StandIn`."""
    import torch

    torch.set_num_threads(threads)
    left, right, output = torch.randn(64, 512), torch.randn(512, 512), torch.empty(64, 512)
    while True:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.mm(left, right, out=output)
        time.sleep(REST_S)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "compute":
        compute(float(rest[0]) / 1e3, int(rest[1]))
    else:
        import uvicorn

        step_s = float(rest[1]) / 1e3 + REST_S
        uvicorn.run(Bare(step_s), port=int(rest[0]), log_level="warning", loop="uvloop", http="httptools")


if __name__ == "__main__":
    main()
