"""Microseconds of looking for drafts on a CPU, by how many rows and tokens; the last line of output is JSON.

    python tools/bench_drafts.py [--threads 1] [--seconds 0.3] [--isa auto]

`absent` is text without a match, so that all of a row is read; `words` text of 2,000 words that come about as often as
a language's; `binary` the worst, two tokens and matches of up to 64 instead of 5. `suffix` searches rows of 4,096
words and 65,536 recent ones. Every figure is of a step, the best of many; `copy_us` is the time to copy the same
tokens, the machine's own measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from attention_backends.toolchain import default_cache_dir
from engine.runner.kernels.ngram import SuffixKernels
from engine.runner.kernels.ngram_host import END, HostDraftKernels
from engine.runner.kernels.ngram_native import ISAS, NativeDraftKernels

DRAFTS, RECENT = 10, 1 << 16


def text(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    rng = np.random.default_rng(0)
    if kind == "words":
        values = np.minimum(rng.zipf(1.2, shape), 2000)
    else:
        values = rng.integers(0, 2 if kind == "binary" else 1 << 30, shape)
    return torch.from_numpy(values.astype(np.int32))


def best_us(step: Callable[[], object], seconds: float) -> float:
    step()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 1000):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return round(min(times) * 1e6, 1)


def bench(kernels: SuffixKernels, kind: str, rows: int, known: int, seconds: float) -> dict[str, object]:
    suffix = kind == "suffix"
    tokens = text("words" if suffix else kind, (rows, known + DRAFTS))
    lengths = torch.full((rows,), known, dtype=torch.int32)
    most, index = torch.full_like(lengths, DRAFTS), torch.arange(rows)
    recent = text("words", (RECENT,))
    recent[499::500] = END
    recent[-1] = END

    def step() -> torch.Tensor:
        if suffix:
            return kernels.propose_suffix(tokens, index, lengths, most, recent, 24, 1.0, 0.1)
        return kernels.propose_ngram(tokens, index, lengths, most, 64 if kind == "binary" else 5, 2)

    us, copy = best_us(step, seconds), best_us(tokens.clone, seconds / 4)
    line = {"kernels": type(kernels).__name__, "text": kind, "rows": rows, "tokens": known, "us": us}
    return line | {"us_a_row": round(us / rows, 2), "copy_us": copy, "drafts_a_row": float(step().float().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="time spent on each figure")
    parser.add_argument("--isa", choices=ISAS, default="auto", help="of the native kernels")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where they are built")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for kernels in (NativeDraftKernels(args.cache_dir, args.isa), HostDraftKernels()):
        for kind in ("absent", "words", "binary", "suffix"):
            for known in (4096, 32768, 131072) if kind != "suffix" else (4096,):
                for rows in (1, 128):
                    results.append(bench(kernels, kind, rows, known, args.seconds))
                    print(results[-1], file=sys.stderr, flush=True)
    print(json.dumps({"threads": args.threads, "isa": args.isa, "results": results}))


if __name__ == "__main__":
    main()
