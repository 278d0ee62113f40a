"""How one row reads weights from memory: as many panels at once, and through the caches or past them, as this machine
likes best.

One row is bound by memory. A core that reads several streams side by side asks more of it, until there are more than
its prefetchers follow: between CPUs the best number differs by a factor of four, and the time by a third. What is read
past the caches leaves in them what the host needs between two steps, which else is read from memory, too (on a Zen 5
a fourth to a third of the host's time); but where it must pass the few places of the first level, fewer lines may be
under way. So both are timed once on a machine, when the first large model is loaded (about a second), and kept in the
cache directory with what was measured: where others computed meanwhile, for this start alone. No bit of a result
depends on them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from compilation.directory import trusted_directory
from compilation.store import locked, write_atomically
from engine.cpu_kernels.formats import PANEL, Format
from engine.cpu_kernels.linear import LinearOps

logger = logging.getLogger(__name__)

CANDIDATES = (1, 2, 3, 4, 6, 8)
LEAST_BYTES = 128 << 20
"""of a model's weights, so that no cache holds them: smaller ones measure nothing"""
_PAST_IF = 0.97
"""of the speed through the caches that reading past them must reach"""
_SHAPES = ((32_768, 576), (8192, 1536), (8192, 4096))
"""[n, k] of what is read: 124 MiB"""
_CACHES = 4
"""times the last level of the caches, at least, is what is read, so that it does not hold it"""
_MOST_BYTES = 1 << 30
_BYTE = 0x3C
"""of all weights: they are neither 0, as pages that share their memory are, nor denormal"""
_ROUNDS = 7
_OWN = 0.9
"""of the time that its threads could compute, what a timing must have had to be kept"""


class Reading(NamedTuple):
    streams: int
    """panels of bfloat16 weights that one row meets at once, 1 to 8"""
    past: bool
    """the caches, where a weight is used once"""


DEFAULT = Reading(4, False)
"""while nothing is known"""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu: str
    threads: int
    gb_per_s: dict[int, float]
    """by streams, through the caches"""
    past_gb_per_s: dict[int, float]

    def best(self) -> Reading:
        fast, past = (max(each, key=each.__getitem__) for each in (self.gb_per_s, self.past_gb_per_s))
        if self.past_gb_per_s[past] >= _PAST_IF * self.gb_per_s[fast]:
            return Reading(past, True)
        return Reading(fast, False)


def choose_reading(ops: LinearOps, weight_bytes: int, cache_dir: Path) -> Reading:
    """For a model of as many bytes; to be called before layers are run, by the thread that will run them. Raises
    CompileError if the cache directory is not trusted."""
    cpu, threads = _cpu(ops), torch.get_num_threads()
    name = hashlib.sha256(f"{cpu}, {threads}".encode()).hexdigest()[:32]
    path = trusted_directory(trusted_directory(cache_dir.absolute()) / "linears") / f"reading-{name}.json"
    found = _read(path)
    if found is None and weight_bytes >= LEAST_BYTES:
        try:
            with locked(path):  # others wait for the first one
                found = _read(path) or _timed(ops, cpu, threads, path)
        except OSError as error:
            logger.info("how weights are read best cannot be kept: %s", error)
            found = _timed(ops, cpu, threads, None)
    best = DEFAULT if found is None else found.best()
    if best.past and weight_bytes < 2 * _last_level_bytes():
        best = Reading(best.streams, False)  # they stay there from step to step
    ops.choose_reading(*best)
    return best


def _timed(ops: LinearOps, cpu: str, threads: int, path: Path | None) -> _File:
    """Kept at `path`, if nobody else computed meanwhile. Raises OSError where that cannot be written."""
    through, past, own = measured(ops)
    found = _File(cpu=cpu, threads=threads, gb_per_s=through, past_gb_per_s=past)
    again = "" if own >= _OWN else "; others computed meanwhile, so the next start times again"
    logger.info("weights for one row, GB/s by streams: %s; past the caches: %s%s", through, past, again)
    if own >= _OWN and path is not None:
        write_atomically(path, msgspec.json.format(msgspec.json.encode(found)).decode())
    return found


def measured(ops: LinearOps) -> tuple[dict[int, float], dict[int, float], float]:
    """Streams → GB/s through the caches and past them, the best of some rounds that take all ways in turn; and of the
    time that its threads could have computed, what they had. By the kernels without AMX: those with it have a way of
    their own."""
    isa = 1 + max(i for i, isa in enumerate(ops.isas) if isa != "amx")
    layer_bytes = sum(n * k * 2 for n, k in _SHAPES)
    layers = max(1, min(_CACHES * _last_level_bytes(), _MOST_BYTES) // layer_bytes)
    weights = [torch.full((n // PANEL, PANEL * k * 2), _BYTE, dtype=torch.uint8) for n, k in _SHAPES * layers]
    rows = {k: torch.ones(1, k, dtype=torch.bfloat16) for _, k in _SHAPES}
    ways = [Reading(streams, past) for streams in CANDIDATES for past in (False, True)]
    best = dict.fromkeys(ways, float("inf"))
    began, computed = time.perf_counter(), time.process_time()
    for _ in range(_ROUNDS):
        for way in ways:
            ops.choose_reading(*way)
            start = time.perf_counter()
            for weight, (n, k) in zip(weights, _SHAPES * layers, strict=True):
                ops.packed_linear(rows[k], weight, n, int(Format.BFLOAT16), None, None, 0.0, None, 0, False, isa)
            best[way] = min(best[way], time.perf_counter() - start)
    own = (time.process_time() - computed) / (time.perf_counter() - began) / torch.get_num_threads()
    gb = layers * layer_bytes / 1e9
    through, past = ({s: round(gb / best[Reading(s, p)], 2) for s in CANDIDATES} for p in (False, True))
    return through, past, own


def _last_level_bytes() -> int:
    """Of the caches; 32 MiB where the system does not tell."""
    with suppress(ValueError, OSError, AttributeError):
        if (found := os.sysconf("SC_LEVEL3_CACHE_SIZE")) > 0:
            return found
    return 32 << 20


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
    return found if set(found.gb_per_s) == set(found.past_gb_per_s) == set(CANDIDATES) else None
