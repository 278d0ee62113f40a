"""The cache's CUDA kernels, run on a CPU: every byte that they should write, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_cuda import EmulatedKernels, kernels_in
from hypothesis import given, settings
from hypothesis import strategies as st

FP8 = torch.float8_e4m3fn
SHAPES = [
    (64, torch.bfloat16, torch.bfloat16),
    (96, torch.float16, torch.float16),
    (256, torch.bfloat16, torch.bfloat16),
    (64, torch.float16, FP8),
    (96, torch.bfloat16, FP8),
    (128, torch.bfloat16, FP8),
]


@pytest.fixture(scope="session")
def cache_kernels(native_cache: Path) -> EmulatedKernels:
    return kernels_in(native_cache, ["cache.cu"])


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits: NaN compares equal to itself."""
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN and infinities among them."""
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)


def as_cached(rows: torch.Tensor, scale: float, kv_dtype: torch.dtype) -> torch.Tensor:
    if kv_dtype != FP8:
        return rows
    codes = (rows.float() / scale).clamp(-448, 448).to(FP8).view(torch.uint8)
    return torch.where(rows.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes).view(FP8)  # NaN has no sign here


@pytest.mark.parametrize(("head_dim", "dtype", "kv_dtype"), SHAPES, ids=str)
@given(
    heads=st.sampled_from([1, 2, 3, 8, 20]),
    block_size=st.sampled_from([16, 32, 256]),
    tokens=st.integers(0, 40),
    merged=st.booleans(),
    scales=st.sampled_from([(1.0, 1.0), (0.013, 3.7)]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=settings.default.max_examples // 7)
def test_write_puts_each_row_into_its_slot_and_nothing_else(
    cache_kernels: EmulatedKernels,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    heads: int,
    block_size: int,
    tokens: int,
    merged: bool,
    scales: tuple[float, float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    launchers = cache_kernels(head_dim, dtype, kv_dtype)
    launchers.seed(seed)
    num_blocks = 40 // block_size + 3
    cache = noise((num_blocks, 2, heads, block_size, head_dim), kv_dtype)
    qkv = noise((tokens + 1, 3 * heads, head_dim), dtype) if merged else noise((3, tokens + 1, heads, head_dim), dtype)
    _, k, v = qkv.split(heads, dim=1) if merged else qkv
    slots = torch.randperm(num_blocks * block_size)[: tokens + 1]
    slots[torch.rand(tokens + 1) < 0.2] = -1
    want = cache.clone()
    for token in range(tokens):
        block, offset = divmod(int(slots[token]), block_size)
        if slots[token] >= 0:
            raw(want)[block, 0, :, offset] = raw(as_cached(k[token], scales[0], kv_dtype))
            raw(want)[block, 1, :, offset] = raw(as_cached(v[token], scales[1], kv_dtype))
    launchers.write_kv(k, v, cache, slots, tokens, *scales)
    assert torch.equal(raw(cache), raw(want))


def layers_of(num_layers: int, num_blocks: int, block_bytes: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    caches = [torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8) for _ in range(num_layers)]
    return caches, torch.tensor([cache.data_ptr() for cache in caches])


# A slab is 16 KiB: below, exactly, just above, several and a part.
@pytest.mark.parametrize("block_bytes", [16, 48, 16384, 16400, 50_000])
@pytest.mark.parametrize(("num_layers", "num_moves"), [(1, 1), (3, 4), (2, 40)])
def test_moved_blocks_are_the_same_in_every_layer(
    cache_kernels: EmulatedKernels, num_layers: int, num_moves: int, block_bytes: int
) -> None:
    torch.manual_seed(block_bytes)
    launchers = cache_kernels(64, torch.bfloat16, torch.bfloat16)
    caches, bases = layers_of(num_layers, 2 * num_moves + 1, block_bytes)
    pairs = torch.randperm(2 * num_moves + 1)[: 2 * num_moves].view(num_moves, 2)
    want = [cache.clone() for cache in caches]
    for cache in want:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
    before = [cache.clone() for cache in caches]
    launchers.copy_blocks(bases, pairs, block_bytes)
    assert all(torch.equal(cache, expected) for cache, expected in zip(caches, want, strict=True))

    for cache, old in zip(caches, before, strict=True):
        cache.copy_(old)
    sources, targets = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    staging = torch.full((num_moves * num_layers * block_bytes + 16,), 7, dtype=torch.uint8)
    launchers.gather_blocks(bases, sources, staging, block_bytes)
    gathered = torch.stack([cache[sources] for cache in before], dim=1)  # [ids, layers, bytes]
    assert torch.equal(staging[:-16].view_as(gathered), gathered)
    launchers.scatter_blocks(bases, targets, staging, block_bytes)
    assert all(torch.equal(cache, expected) for cache, expected in zip(caches, want, strict=True))
    assert (staging[-16:] == 7).all()


def test_more_copies_than_the_grid_has_blocks(cache_kernels: EmulatedKernels) -> None:
    launchers = cache_kernels(64, torch.bfloat16, torch.bfloat16)
    caches, bases = layers_of(64, 140, 16)
    pairs = torch.randperm(140).view(70, 2)
    want = [cache.clone() for cache in caches]
    for cache in want:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
    launchers.copy_blocks(bases, pairs, 16)
    assert all(torch.equal(cache, expected) for cache, expected in zip(caches, want, strict=True))


def test_sizes_that_cannot_be_moved_are_refused(cache_kernels: EmulatedKernels) -> None:
    launchers = cache_kernels(64, torch.bfloat16, torch.bfloat16)
    _, bases = layers_of(1, 2, 64)
    for block_bytes in (0, 24):
        with pytest.raises(RuntimeError, match="multiple of 16"):
            launchers.copy_blocks(bases, torch.tensor([[0, 1]]), block_bytes)
    launchers.copy_blocks(bases, torch.zeros(0, 2, dtype=torch.int64), 64)
    token = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    cache = torch.zeros(1, 2, 1, 24, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="power of two"):
        launchers.write_kv(token, token, cache, torch.zeros(1, dtype=torch.int64), 1, 1.0, 1.0)
