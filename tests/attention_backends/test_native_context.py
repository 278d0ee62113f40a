"""Native calls of ranks that divide a context leave the bits that operators do, in the output and in the cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from native_stages import Call, NativeRows
from paged_case import PADDING, Case

from attention_backends.cpu import CpuBackend
from attention_backends.interface import AttentionSpec, NativeLayer
from attention_backends.reference import ReferenceBackend
from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.sharding import Shard, keys_of, queries_of
from engine.parallel.shared_memory import SharedGroup, allocate
from engine.runner.context import ContextGroup

BF16 = torch.bfloat16
LENGTHS = [(1, 300), (1, 33), (37, 37), (5, 261), (1, 1), (40, 90), (2, 2)]


def facts_of(heads: HeadsSpec) -> ModelFacts:
    nothing = dict.fromkeys(
        ("vocab_size", "hidden_size", "final_size", "intermediate_size", "mlp_values", "linear_weights",
         "active_weights", "max_position"), 0
    )  # fmt: skip
    return ModelFacts(family="heads", layers=(heads,), tie_embeddings=False, **nothing)


class Rank:
    def __init__(self, fd: int, rank: int, size: int, case: Case, cache_dirs: tuple[Path, Path]) -> None:
        kernels, collectives = cache_dirs
        self.group = SharedGroup(fd, "context", rank, size, collectives)
        heads = HeadsSpec(
            num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, scale=case.layer.scale
        )
        self.context = ContextGroup(facts_of(heads), self.group)
        self.backend = CpuBackend()
        self.backend.bind(AttentionSpec(torch.device("cpu"), BF16, case.kv_dtype or BF16, (case.head_dim,)))
        self.backend.prepare(kernels)
        shard = Shard(rank, size)
        self.queries, self.keys = queries_of(heads, shard), keys_of(heads, shard)
        own = slice(self.queries.first, self.queries.end)
        sinks = None if case.layer.sinks is None else case.layer.sinks[own].contiguous()
        self.layer = replace(case.layer, sinks=sinks)
        self._case = case
        self._given = self._rows()

    def _rows(self) -> tuple[torch.Tensor, ...]:
        q, k, v = self._case.qkv()
        of_keys = slice(self.keys.first, self.keys.end)
        rows = torch.cat((q[:, self.queries.first : self.queries.end], k[:, of_keys], v[:, of_keys]), dim=1)
        return rows.split([self.queries.count, self.keys.count, self.keys.count], dim=1)

    def _cache_and_metadata(self) -> tuple[torch.Tensor, Any]:
        case, tables = self._case, self._case.block_tables()
        batch = self.context.batch(case.batch(tables))
        shape = self.backend.kv_cache_shape(case.num_blocks, batch.block_size, case.num_kv_heads, case.head_dim)
        cache = torch.zeros(shape, dtype=case.kv_dtype or BF16)
        cached = [case.slots(tables, i, 0, n - queries) for i, (queries, n) in enumerate(case.lengths)]
        self.backend.write_kv(*case.prefix(), cache, self.context.part.slots(torch.cat(cached)))
        return cache, self.backend.build_metadata(batch)

    def _out(self) -> torch.Tensor:
        return torch.full((self._case.num_tokens + PADDING, self.queries.count, self._case.head_dim), 7.0, dtype=BF16)

    def by_operators(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache, metadata = self._cache_and_metadata()
        out, real = self._out(), slice(self._case.num_tokens)
        q, k, v = (x[real] for x in self._given)
        self.context.attend(self.backend, (q, k, v), out[real], cache, self.layer, 0, metadata)
        out[self._case.num_tokens :] = 0
        return out, cache

    def native(self) -> tuple[torch.Tensor, torch.Tensor]:
        cache, metadata = self._cache_and_metadata()
        out = self._out()
        native = self.context.native_layer(self.backend, self.layer, 0, cache, BF16)
        assert native is not None
        assert self._call(native, self.backend.native_step(metadata), out).run() is None
        return out, cache

    def _call(self, native: NativeLayer, step: torch.Tensor, out: torch.Tensor) -> Call:
        scratch = torch.full((len(out) * native.scratch_bytes + 64,), -1, dtype=torch.int8)
        rows = [field for t in (*self._given, out) for field in (t.data_ptr(), t.stride(0))]
        given = NativeRows(*rows, len(out), (scratch.data_ptr() + 63) // 64 * 64)
        call = Call(native.function, native.layer.data_ptr(), step.data_ptr(), given)
        call.holds = native, step, scratch, self
        return call

    def refusal_of_another_part(self) -> str | None:
        cache, metadata = self._cache_and_metadata()
        native = self.context.native_layer(self.backend, self.layer, 0, cache, BF16)
        assert native is not None
        whole = replace(metadata, context=replace(metadata.context, rank=1 - self.group.rank))
        return self._call(native, self.backend.native_step(whole), self._out()).refusal


def ranks_of(size: int, case: Case, cache_dirs: tuple[Path, Path]) -> list[Rank]:
    fd = allocate(size, 1 << 14)
    try:
        return [Rank(fd, rank, size, case, cache_dirs) for rank in range(size)]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (2, {"num_heads": 9, "num_kv_heads": 3, "sinks": True, "window": 40}),
        (3, {"num_heads": 8, "num_kv_heads": 2, "soft_cap": 20.0}),
        (2, {"kv_dtype": torch.int8, "num_heads": 4, "num_kv_heads": 1}),
        (2, {"lengths": [(1, 1)]}),
    ],
    ids=str,
)
def test_native_calls_have_the_bits_of_the_operators(
    size: int, changes: dict[str, Any], kernel_cache: Path, native_cache: Path
) -> None:
    """Heads that do not divide, and keys that ranks have in common."""
    case = Case(**{"lengths": LENGTHS, "block_size": 16 * size, "dtype": BF16, "head_dim": 64, **changes})
    ranks = ranks_of(size, case, (kernel_cache, native_cache))
    with ThreadPoolExecutor(size) as pool:
        expected = list(pool.map(Rank.by_operators, ranks))
        found = list(pool.map(Rank.native, ranks))
    for (out, cache), (of_operators, its_cache) in zip(found, expected, strict=True):
        assert torch.equal(out.view(torch.int16), of_operators.view(torch.int16))
        assert torch.equal(cache.view(torch.int8), its_cache.view(torch.int8))
    whole = case.run(ReferenceBackend(), torch.float64).float()
    together = torch.cat([out[: case.num_tokens] for out, _ in found], dim=1).float()
    torch.testing.assert_close(together, whole, rtol=2**-6, atol=2**-6)


def test_a_step_of_another_part_is_refused(kernel_cache: Path, native_cache: Path) -> None:
    case = Case(LENGTHS, block_size=32, dtype=BF16)
    for rank in ranks_of(2, case, (kernel_cache, native_cache)):
        assert "another part of the context" in (rank.refusal_of_another_part() or "")
