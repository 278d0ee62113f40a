"""Microseconds of sampling per step, by batch, vocabulary and parameters; the last line of output is JSON.

    python tools/bench_sampling.py [--device cpu] [--kernels native|torch] [--threads 2] [--seconds 0.5]

Logits are random with the spread of a language model's (a few likely tokens over a broad tail), so that top-p keeps
tens of tokens; `top_p_flat` is the opposite, a nucleus of half the vocabulary. `copies` is the time in copies of the
logits, the machine's own measure. Logits are restored before each step, which is timed alone: they are where a model's
last layer leaves them, in a cache or not. `best` is the figure to use on a busy machine. `--kernels`: on a CPU, the C++
kernels (the default; built into `--cache-dir`), one instruction set of them with `--isa`, or the torch path.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attention_backends.toolchain import default_cache_dir
from engine.sampling import Sampler
from engine.sampling.kernels import SamplingKernels, select_kernels
from engine.sampling.kernels.host import HostKernels
from engine.sampling.kernels.native import ISAS, NativeKernels
from engine.step import RowParams

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k_50": {"top_k": 50},
    "top_p_0.9": {"top_p": 0.9},
    "min_p_0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs_5": {"temperature": 0.0, "logprobs": 5},
    "top_p_flat": {"top_p": 0.9},
}
SHAPES = [(1, 49_152), (64, 49_152), (1, 262_144), (64, 262_144)]
HISTORY = 512
LINE = "{case:<12} batch {batch:>3} vocab {vocab:>7} median {us:>10} us  best {best_us:>10} us {copies:>7} copies"


def realistic_logits(batch: int, vocab: int, flat: bool, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, vocab, generator=generator)
    if not flat:
        logits.mul_(2.5)
        peaks = torch.randint(vocab, (batch, 40), generator=generator)
        logits.scatter_(1, peaks, 12.0 + 3.0 * torch.randn(batch, 40, generator=generator))
    return logits.to(device)


def time_us(
    prepare: Callable[[], object], step: Callable[[], object], seconds: float, device: torch.device
) -> tuple[float, float]:
    """(median, best) of `step`, each time after `prepare`."""

    def timed() -> float:
        prepare()
        wait(device)
        start = time.perf_counter()
        step()
        wait(device)
        return time.perf_counter() - start

    timed(), timed()
    times = [timed()]
    while len(times) < 5 or (sum(times) < seconds and len(times) < 1000):
        times.append(timed())
    return statistics.median(times) * 1e6, min(times) * 1e6


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernels_for(args: argparse.Namespace, vocab: int) -> SamplingKernels:
    device = torch.device(args.device)
    if device.type != "cpu":
        return select_kernels(device, vocab)
    if args.kernels == "torch":
        return HostKernels(vocab, device)
    return NativeKernels(vocab, args.cache_dir, args.isa)


def bench(case: str, batch: int, kernels: SamplingKernels, args: argparse.Namespace, vocab: int) -> dict[str, object]:
    device = torch.device(args.device)
    sampler = Sampler(batch, vocab, device, max_model_len=2 * HISTORY, kernels=kernels)
    history = torch.randint(vocab, (batch, 2 * HISTORY), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    for row in range(batch):
        known = history[row, :HISTORY].tolist()
        sampler.add(row, RowParams(seed=row, **CASES[case]), known, HISTORY // 2)  # type: ignore[arg-type]
    for table, row, start, values in sampler.drain_writes():
        target = sampler.tables()[table]
        target[row, start : start + len(values)] = torch.tensor(values, dtype=target.dtype, device=device)
    source = realistic_logits(batch, vocab, case == "top_p_flat", device)
    logits, tokens = source.clone(), history.to(device)
    rows, rows_host = torch.arange(batch, device=device), list(range(batch))
    positions = torch.full((batch,), HISTORY, device=device)

    def step() -> None:
        sampler.sample(logits, rows, rows_host, positions, tokens)

    def restore() -> None:
        logits.copy_(source)

    _, copy_best = time_us(restore, restore, args.seconds / 5, device)
    median, best = time_us(restore, step, args.seconds, device)
    return {
        "case": case,
        "batch": batch,
        "vocab": vocab,
        "us": round(median, 1),
        "best_us": round(best, 1),
        "copies": round(best / copy_best, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    parser.add_argument("--batch", type=int, help="only this batch size")
    parser.add_argument("--vocab", type=int, help="only this vocabulary")
    parser.add_argument("--case", choices=sorted(CASES), help="only this case")
    parser.add_argument("--kernels", choices=("native", "torch"), default="native", help="on a CPU")
    parser.add_argument("--isa", choices=ISAS, default="auto", help="of the native kernels")
    parser.add_argument("--cache-dir", type=Path, default=default_cache_dir(), help="where they are built")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for batch, vocab in SHAPES:
        if args.batch in (None, batch) and args.vocab in (None, vocab):
            kernels = kernels_for(args, vocab)
            for case in CASES if args.case is None else (args.case,):
                results.append(bench(case, batch, kernels, args, vocab))
                print(LINE.format(**results[-1]), file=sys.stderr, flush=True)
    kernels_used = type(kernels_for(args, 1)).__name__
    summary = {"device": args.device, "kernels": kernels_used, "isa": args.isa, "threads": args.threads}
    summary |= {"torch": torch.__version__, "results": results}
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
