"""All-reduce between two processes of this machine, ours beside gloo's: each is called from Python in a tight loop.

    python tools/bench_collectives.py [--rounds 20] [--ranks 2]

Both take turns, so that what else the machine does meets both alike. "call" is what of our time is spent before and
behind the library's own: the same operator on one number, in a group of one rank. The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from attention_backends.toolchain import default_cache_dir
from engine.parallel.shared_memory import SharedGroup, allocate

COLUMNS = 576
ROWS = (1, 64, 114, 1820)
"""float32 tensors of 2.3 KB, 147 KB, 263 KB, 4.2 MB"""
SLOT_BYTES = 1 << 20


def keep_memory() -> None:
    """What is freed stays with the process: large results would else be pages to clear in every call (glibc)."""
    most_mappings, trim_threshold = -4, -1  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(most_mappings, 0)
        libc.mallopt(trim_threshold, -1)


def times_us(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return times


def quantiles(times: list[float]) -> tuple[float, float]:
    """p50, p95"""
    cuts = statistics.quantiles(times, n=20)
    return cuts[9], cuts[18]


def busy_s() -> tuple[float, float]:
    """Seconds that this machine's CPUs have computed, and that others took from them."""
    fields = [int(x) / os.sysconf("SC_CLK_TCK") for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[:3]) + sum(fields[5:7]), fields[7]


def run_rank(rank: int, ranks: int, fds: list[int], store: str, rounds: int, slot_bytes: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)  # before it is pinned
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    group = SharedGroup(fds[0], "bench", rank, ranks, default_cache_dir())
    alone = SharedGroup(fds[1 + rank], "alone", 0, 1, default_cache_dir())
    ours, one, own_call = group.all_reduce, torch.ones(1, 1), alone.all_reduce
    load, began, (computed, stolen), mine = os.getloadavg()[0], time.monotonic(), busy_s(), time.process_time()
    found: dict[int, dict[str, list[float]]] = {rows: {"ours": [], "gloo": [], "call": []} for rows in ROWS}
    for rows in ROWS:
        x, count = torch.ones(rows, COLUMNS), max(2000 // rows, 10)
        y = x.clone()
        for _ in range(rounds):
            found[rows]["ours"] += times_us(partial(ours, x, None, torch.float32, "bench"), count)
            found[rows]["gloo"] += times_us(partial(dist.all_reduce, y), max(count // 10, 5))
            found[rows]["call"] += times_us(lambda: own_call(one, None, torch.float32, "alone"), 50)
            y.zero_()
    took = time.monotonic() - began
    if rank == 0:
        computed_since, stolen_since = (now - then for now, then in zip(busy_s(), (computed, stolen)))
        others = max(computed_since - ranks * (time.process_time() - mine), 0)
        report(found, f"load {load:.1f}; meanwhile others took {others / took:.2f} cores of {len(cores)}, "
               f"the host {stolen_since / took:.2f}")  # fmt: skip
    group.close()
    dist.destroy_process_group()


def report(found: dict[int, dict[str, list[float]]], machine: str) -> None:
    print(f"{'bytes':>9} | {'ours p50':>9} {'p95':>9} | {'call p50':>9} | {'gloo p50':>9} {'p95':>9} | gloo / ours")
    summary = []
    for rows, kinds in found.items():
        ours, gloo, call = (quantiles(kinds[kind]) for kind in ("ours", "gloo", "call"))
        ratio = gloo[0] / ours[0]
        print(
            f"{rows * COLUMNS * 4:>9} | {ours[0]:>9.1f} {ours[1]:>9.1f} | {call[0]:>9.1f} | {gloo[0]:>9.1f} "
            f"{gloo[1]:>9.1f} | {ratio:>7.1f}"
        )
        summary.append({"bytes": rows * COLUMNS * 4, "ours_us": ours, "call_us": call[0], "gloo_us": gloo})
    print(machine)
    print(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slot-bytes", type=int, default=SLOT_BYTES)
    options = parser.parse_args()
    fds = [allocate(options.ranks, options.slot_bytes), *(allocate(1, 1) for _ in range(options.ranks))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, fds, f"{folder}/store", options.rounds, options.slot_bytes)
        start: Any = mp.start_processes  # type: ignore[attr-defined]  # torch does not list it
        start(run_rank, arguments, nprocs=options.ranks, start_method="fork")


if __name__ == "__main__":
    main()
