"""How many panels of bfloat16 weights one row meets at once: the machine's choice.

One row is bound by memory. A core that reads several streams side by side asks more of it, until there are more than
its prefetchers follow: between CPUs the best number differs by a factor of four, and the time by a third. So it is
timed once on a machine, on weights of the first large model (about a second), and kept in the cache directory with what
was measured. No bit of a result depends on it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from compilation.directory import trusted_directory
from compilation.store import locked, write_atomically
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps

logger = logging.getLogger(__name__)

CANDIDATES = (1, 2, 3, 4, 6, 8)
DEFAULT = 4
"""for models that are too small to tell, while nothing is known"""
LEAST_BYTES = 128 << 20
"""of weights, so that no cache holds them"""
_MOST_BYTES = 512 << 20
_ROUNDS = 7


class Matrix(NamedTuple):
    """Packed as bfloat16."""

    weight: torch.Tensor
    n: int
    k: int


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu: str
    threads: int
    gb_per_s: dict[int, float]
    """by streams"""


def choose_streams(ops: LinearOps, matrices: Sequence[Matrix], cache_dir: Path) -> int:
    """To be called before layers are run, by the thread that will run them. Raises CompileError if the cache directory
    is not trusted."""
    cpu, threads = _cpu(ops), torch.get_num_threads()
    name = hashlib.sha256(f"{cpu}, {threads}".encode()).hexdigest()[:32]
    path = trusted_directory(trusted_directory(cache_dir.absolute()) / "linears") / f"streams-{name}.json"
    with locked(path):
        found = _read(path)
        if found is None and sum(m.weight.numel() for m in matrices) >= LEAST_BYTES:
            found = _File(cpu=cpu, threads=threads, gb_per_s=measured(ops, matrices))
            write_atomically(path, msgspec.json.format(msgspec.json.encode(found)).decode())
            logger.info("streams of weights for one row, GB/s: %s", found.gb_per_s)
    best = DEFAULT if found is None else max(found.gb_per_s, key=found.gb_per_s.__getitem__)
    return ops.choose_streams(best)


def measured(ops: LinearOps, matrices: Sequence[Matrix]) -> dict[int, float]:
    """Streams → GB/s, the best of some rounds that take them in turn."""
    chosen: list[Matrix] = []
    size = 0
    for matrix in matrices:
        if size < _MOST_BYTES:
            chosen.append(matrix)
            size += matrix.weight.numel()
    rows = {matrix.k: torch.ones(1, matrix.k, dtype=torch.bfloat16) for matrix in chosen}
    best = dict.fromkeys(CANDIDATES, float("inf"))
    for _ in range(_ROUNDS):
        for streams in CANDIDATES:
            ops.choose_streams(streams)
            start = time.perf_counter()
            for weight, n, k in chosen:
                ops.packed_linear(rows[k], weight, n, int(Format.BFLOAT16), None, None, 0.0, None, 0, False, 0)
            best[streams] = min(best[streams], time.perf_counter() - start)
    return {streams: round(size / seconds / 1e9, 2) for streams, seconds in best.items()}


def _cpu(ops: LinearOps) -> str:
    """What tells one kind of CPU from another: clouds give several generations one model name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in wanted:
                found.setdefault(key.strip(), value.strip())
    return ", ".join([*(found[key] for key in wanted if key in found), ops.isas[-1]])


def _read(path: Path) -> _File | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError):
        return None
    return found if set(found.gb_per_s) == set(CANDIDATES) else None
