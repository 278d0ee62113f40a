"""The machine's own yardstick for W1: the bare linear kernels at one row, every layer once, and nothing else.

A token cannot take less than these take. Only W1's time per token means anything.
"""

from __future__ import annotations

import time
from typing import Any

from entrypoints.bench.metrics import Record
from entrypoints.bench.workloads import BenchRequest

FORMATS = {"bf16": "BFLOAT16", "int8": "INT8", "int4": "Q4_1"}


class Linear:
    def __init__(self, settings: dict[str, Any]) -> None:
        import bench_linear
        import torch

        from attention_backends.toolchain import default_cache_dir
        from engine.cpu_kernels import linear
        from engine.cpu_kernels.formats import Format

        torch.set_num_threads(settings["threads"])
        format = Format[FORMATS[settings["weights"]]]
        self._sweep = bench_linear.packed_sweep(
            linear.load(default_cache_dir()), bench_linear.make_layers(format), 1, format, 0
        )
        self._inference = torch.inference_mode
        self.versions = {"torch": torch.__version__}
        self.facts = {"weights": settings["weights"], "threads": settings["threads"]}

    def run(self, requests: list[BenchRequest]) -> tuple[list[Record], float, float]:
        """As if each sweep made a token of the one request."""
        start = time.perf_counter()
        times = []
        with self._inference():
            for _ in range(requests[0].max_tokens):
                self._sweep()
                times.append(time.perf_counter())
        records = [
            Record(start, times[0], times[-1], len(r.prompt_token_ids), r.max_tokens, r.max_tokens) for r in requests
        ]
        return records, start, times[-1]


def load(settings: dict[str, Any]) -> Linear:
    return Linear(settings)
