"""Run by test_page_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Every Triton kernel and its twin work on copies of the same random tensors, and all of memory is compared bit by bit
afterwards, so a store outside of what a kernel owns is seen too. Prints one line per case that passed; raises on the
first that differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
from quick_interpreter import quicken

from attention_backends.page_kernels import FP8
from attention_backends.page_kernels.device import TritonKernels
from attention_backends.page_kernels.host import HostKernels

KERNELS = (TritonKernels(), HostKernels())
NOWHERE = 2**30


def assert_same_bits(ours: torch.Tensor, twin: torch.Tensor) -> None:
    assert torch.equal(ours.view(torch.uint8), twin.view(torch.uint8))


def check_gather(rng: np.random.Generator) -> None:
    """Uneven lists, empty ones among them, some longer than a program's block; table entries that no list names hold
    an address that would crash."""
    n, columns = int(rng.integers(1, 7)), 600
    counts = rng.integers(0, 4, n) if rng.random() < 0.5 else rng.integers(0, columns, n)
    firsts = np.array([rng.integers(0, columns - count + 1) for count in counts], np.int32)
    tables = np.full((n + 1, columns), NOWHERE, np.int32)
    want: list[int] = []
    for row, (first, count) in enumerate(zip(firsts, counts)):
        tables[row, first : first + count] = rng.integers(0, 10_000, count)
        want += tables[row, first : first + count].tolist()
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
    for kernels in KERNELS:
        out = torch.full((len(want) + 5,), -77, dtype=torch.int32)
        args = (torch.from_numpy(tables), starts, torch.from_numpy(firsts), out, int(counts.max()))
        kernels.gather_pages(*args)
        assert out.tolist() == [*want, *[-77] * 5]


def check_write(rng: np.random.Generator, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    heads, dim, page, blocks = int(rng.integers(1, 4)), int(rng.choice([64, 96, 256])), 16, 5
    tokens, padding, gaps = int(rng.integers(1, 9)), 3, int(rng.integers(0, 3))
    # k and v as views of one projection's output, whose first columns are the queries
    merged = torch.from_numpy(rng.standard_normal((tokens + padding, (2 + 2 * heads) * dim)) * 100).to(dtype)
    _, k, v = (part.unflatten(1, (-1, dim)) for part in merged.split([2 * dim, heads * dim, heads * dim], dim=1))
    k[0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    slots = torch.from_numpy(rng.permutation(blocks * page)[:tokens])
    slots[rng.integers(0, tokens)] = -1
    scales = (float(rng.uniform(0.01, 3)), float(rng.uniform(0.01, 3)))
    caches = []
    for kernels in KERNELS:
        size, gap = 2 * heads * page * dim, 64 * gaps
        raw = torch.full((blocks, gap + size), 7, dtype=torch.uint8 if cache_dtype == FP8 else cache_dtype)
        cache = raw[:, gap:].view(blocks, 2, heads, page, dim).view(cache_dtype)
        kernels.write_kv(k, v, cache, slots, *scales)
        caches.append(cache)
        assert (raw[:, :gap] == 7).all()
    assert_same_bits(*caches)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0 and cache_dtype != FP8:
            assert_same_bits(caches[0][slot // page, 1, :, slot % page].contiguous(), v[token].contiguous())


def check_every_16_bit_float_to_fp8(dtype: torch.dtype, scale: float) -> None:
    """All 65,536 of them, subnormals, infinities and NaN included, against torch's own rounding."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(16, 16, 256)
    caches = []
    for kernels in KERNELS:
        cache = torch.zeros(1, 2, 16, 16, 256, dtype=torch.uint8).view(FP8)
        kernels.write_kv(every, every, cache, torch.arange(16), scale, 1.0)
        caches.append(cache)
    assert_same_bits(*caches)


def check_copy(rng: np.random.Generator, dtype: torch.dtype) -> None:
    layers, blocks = int(rng.integers(1, 4)), 12
    shape = (blocks, 2, int(rng.integers(1, 4)), 16, 64)
    original = [
        torch.from_numpy(rng.integers(0, 120, shape).astype(np.uint8)).to(torch.uint8 if dtype == FP8 else dtype)
        for _ in range(layers)
    ]
    order = rng.permutation(blocks)
    count = int(rng.integers(1, 5))
    pairs = [(int(order[int(rng.integers(0, 4))]), int(to)) for to in order[4 : 4 + count]]  # sources may repeat
    for kernels in KERNELS:
        caches = [cache.clone().view(dtype) for cache in original]
        kernels.copy_blocks(caches, torch.tensor(pairs))
        for cache, before in zip(caches, original):
            expected = before.clone()
            for source, destination in pairs:
                expected[destination] = before[source]
            assert_same_bits(cache, expected)


def main() -> None:
    quicken()
    rng = np.random.default_rng(int(sys.argv[1]))
    for case in range(6):
        check_gather(rng)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            check_write(rng, dtype, dtype)
            check_write(rng, dtype, FP8)
            check_copy(rng, dtype)
        check_copy(rng, FP8)
        print(f"case {case} equal", flush=True)
    for dtype in (torch.bfloat16, torch.float16):
        for scale in (1.0, 0.37):
            check_every_16_bit_float_to_fp8(dtype, scale)
            print(f"every {dtype} by {scale} equal", flush=True)


if __name__ == "__main__":
    main()
