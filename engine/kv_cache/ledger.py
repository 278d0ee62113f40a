"""The memory ledger: where a device's bytes go, and how many KV blocks that leaves. Printed before serving.

A pure function, so that every refusal can be tested without a device: a figure that does not fit says which setting
would.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Literal

import msgspec

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.layer_groups import most_blocks
from engine.reports import LoadReport

CPU_SHARE = 0.25
"""Of the memory that is left on a CPU, the part that the KV cache takes unasked at most: the rest of the machine lives
there too."""
TYPICAL_TOKENS, FULL_SEQUENCES = 512, 4
"""What it takes unasked is enough for `max_num_seqs` sequences of so many tokens (chats have some 500, prompt and
answer together), and for so many of the whole context. A pool fills with prefixes: in the end all of it is resident."""
_LESS = "free device memory, use a smaller model, or lower --max-num-batched-tokens"


class MemoryLedger(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one device and the KV blocks they hold."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    sequence_blocks: int
    """what a sequence of `max_model_len` tokens holds at most"""
    num_groups: int
    num_host_blocks: int
    """of the host tier"""
    device_bytes_total: int
    device_bytes_free: int
    """before anything was loaded"""
    weight_bytes: int
    activation_bytes: int
    workspace_bytes: int
    graph_bytes: int
    source: str
    """the setting that decided the cache's size"""
    replicas: int = 1
    """that share a machine's memory, of which these bytes are one's part"""

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of sequences of `max_model_len`."""
        return self.num_blocks * self.max_model_len // self.sequence_blocks

    def table(self) -> str:
        """Human-readable, one line per entry."""
        left = self.device_bytes_free - _fixed(self) - self.kv_bytes
        rows = [
            ("device memory", human(self.device_bytes_total), _shared(self.replicas)),
            ("in use by others", human(self.device_bytes_total - self.device_bytes_free), ""),
            ("weights", human(self.weight_bytes), ""),
            ("activations", human(self.activation_bytes), "peak of a full step"),
            ("workspace", human(self.workspace_bytes), "tables, sampler, attention"),
            ("graphs", human(self.graph_bytes), "estimated" if self.graph_bytes else ""),
            (
                "KV cache",
                human(self.kv_bytes),
                f"{self.num_blocks} blocks of {self.block_size} tokens, {human(self.block_bytes)} each; {self.source}",
            ),
            ("left free", human(left), ""),
        ]
        lines = [f"{name:<18}{size:>11}  {note}".rstrip() for name, size, note in rows]
        if self.num_groups > 1:
            lines.append(f"layers form {self.num_groups} groups, each with blocks of its own")
        if self.num_host_blocks:
            size = human(self.num_host_blocks * self.block_bytes)
            lines.append(f"{'host tier':<18}{size:>11}  {self.num_host_blocks} blocks in host memory; --swap-space")
        sequences = self.num_blocks / self.sequence_blocks
        lines.append(f"room for {self.kv_tokens} tokens: {sequences:.1f} sequences of {self.max_model_len}")
        return "\n".join(lines)


def memory_ledger(
    *,
    load: LoadReport,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    device: Literal["cpu", "cuda"],
    replicas: int = 1,
) -> MemoryLedger:
    """Divide a device's memory; `ConfigError` when not even one sequence of ``max_model_len`` tokens fits.

    Of a CPU's memory one of ``replicas`` has its part. ``kv_cache_memory`` is taken as given. Without it the cache gets
    what ``memory_fraction`` of the device leaves (never more than is free); on a CPU what sequences of typical length
    need, at most a quarter of that and at least one full sequence.
    """
    if device == "cpu" and replicas > 1:
        load = msgspec.structs.replace(
            load,
            device_bytes_total=load.device_bytes_total // replicas,
            device_bytes_free=load.device_bytes_free // replicas,
        )
        ledger = memory_ledger(load=load, cache=cache, scheduler=scheduler, device=device)
        return msgspec.structs.replace(ledger, replicas=replicas)
    if not load.block_bytes:
        return _ledger_of_an_encoder(load, cache, scheduler)
    num_host_blocks = cache.swap_space // load.block_bytes
    fixed = _fixed(load)
    possible = load.device_bytes_free - fixed - (cache.swap_space if device == "cpu" else 0)
    sequence_blocks = _sequence_blocks(scheduler.max_model_len, load, cache, scheduler)
    if cache.kv_cache_memory is not None:
        if cache.kv_cache_memory > possible:
            raise ConfigError(_too_large(cache.kv_cache_memory, possible, load, fixed))
        num_blocks = cache.kv_cache_memory // load.block_bytes
        source = "--kv-cache-memory"
    else:
        left = min(int(load.device_bytes_total * cache.memory_fraction) - fixed, possible)
        num_blocks = max(left, 0) // load.block_bytes
        source = f"--memory-fraction {cache.memory_fraction:g}"
        if device == "cpu":
            share = max(int(left * CPU_SHARE) // load.block_bytes, min(sequence_blocks, num_blocks))
            num_blocks = min(share, _typical_blocks(sequence_blocks, load, cache, scheduler))
            source = "default for CPU (see --kv-cache-memory)"
    if num_blocks < sequence_blocks:
        raise ConfigError(_too_small(num_blocks, load, cache, scheduler, fixed))
    return _ledger(load, cache, scheduler, (num_blocks, sequence_blocks, num_host_blocks), source)


def _ledger_of_an_encoder(load: LoadReport, cache: CacheConfig, scheduler: SchedulerConfig) -> MemoryLedger:
    """Nothing is kept: blocks take no bytes, and there are as many as all sequences can count."""
    if _fixed(load) > load.device_bytes_free:
        needed, free = human(_fixed(load)), human(load.device_bytes_free)
        raise ConfigError(f"weights, activations and workspace take {needed}, and {free} are free: {_LESS}")
    each = _sequence_blocks(scheduler.max_model_len, load, cache, scheduler)
    return _ledger(load, cache, scheduler, (scheduler.max_num_seqs * each, each, 0), "an encoder keeps nothing")


def _ledger(
    load: LoadReport, cache: CacheConfig, scheduler: SchedulerConfig, blocks: tuple[int, int, int], source: str
) -> MemoryLedger:
    """`blocks`: of the device, of the longest sequence, of the host tier."""
    num_blocks, sequence_blocks, num_host_blocks = blocks
    return MemoryLedger(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        block_bytes=load.block_bytes,
        max_model_len=scheduler.max_model_len,
        sequence_blocks=sequence_blocks,
        num_groups=len(load.windows),
        num_host_blocks=num_host_blocks,
        device_bytes_total=load.device_bytes_total,
        device_bytes_free=load.device_bytes_free,
        weight_bytes=load.weight_bytes,
        activation_bytes=load.activation_bytes,
        workspace_bytes=load.workspace_bytes,
        graph_bytes=load.graph_bytes,
        source=source,
    )


def _sequence_blocks(num_tokens: int, load: LoadReport, cache: CacheConfig, scheduler: SchedulerConfig) -> int:
    """Over all layer groups."""
    step = scheduler.max_num_batched_tokens
    return sum(most_blocks(num_tokens, window, cache.block_size, step) for window in load.windows)


def _typical_blocks(sequence_blocks: int, load: LoadReport, cache: CacheConfig, scheduler: SchedulerConfig) -> int:
    typical = _sequence_blocks(min(TYPICAL_TOKENS, scheduler.max_model_len), load, cache, scheduler)
    return max(scheduler.max_num_seqs * typical, min(FULL_SEQUENCES, scheduler.max_num_seqs) * sequence_blocks)


def _shared(replicas: int) -> str:
    return "" if replicas == 1 else f"the part of one of {replicas} replicas"


def _fixed(report: LoadReport | MemoryLedger) -> int:
    return report.weight_bytes + report.activation_bytes + report.workspace_bytes + report.graph_bytes


def _too_large(asked: int, possible: int, load: LoadReport, fixed: int) -> str:
    message = (
        f"a KV cache of {human(asked)} does not fit: of {human(load.device_bytes_free)} free device memory, weights, "
        f"activations, workspace and graphs take {human(fixed)}."
    )
    if possible < load.block_bytes:
        return (
            f"{message} Nothing is left for a cache: free memory, or use a smaller model or --max-num-batched-tokens."
        )
    return f"{message} Set --kv-cache-memory to at most {possible} ({human(possible)})."


def _too_small(num_blocks: int, load: LoadReport, cache: CacheConfig, scheduler: SchedulerConfig, fixed: int) -> str:
    """Why not even one sequence fits, and every setting that would help, with its value."""
    need = _sequence_blocks(scheduler.max_model_len, load, cache, scheduler) * load.block_bytes
    possible = load.device_bytes_free - fixed
    ways = []
    if cache.kv_cache_memory is not None:
        if need <= possible:
            ways.append(f"raise --kv-cache-memory to at least {need} ({human(need)})")
    else:
        fraction = math.ceil((fixed + need) / load.device_bytes_total * 100) / 100
        if need <= possible and fraction <= 1.0:
            ways.append(f"raise --memory-fraction to at least {fraction:.2f}")
            ways.append(f"set --kv-cache-memory to at least {need}")
    fits = bisect_right(
        range(1, scheduler.max_model_len),
        num_blocks,
        key=lambda tokens: _sequence_blocks(tokens, load, cache, scheduler),
    )
    if fits > 0:
        ways.append(f"lower --max-model-len to at most {fits}")
    if not ways:
        ways.append(_LESS)
    return (
        f"the KV cache has room for {fits} tokens, but one sequence of --max-model-len "
        f"{scheduler.max_model_len} needs {human(need)} (weights, activations, workspace and graphs take "
        f"{human(fixed)} of {human(load.device_bytes_total)}, {human(load.device_bytes_free)} free): "
        f"{', or '.join(ways)}."
    )


def human(size_bytes: int) -> str:
    """1536 → "1.5 KiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
