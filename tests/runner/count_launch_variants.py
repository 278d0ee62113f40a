"""Run by test_input_kernels.py in a process of its own: Triton compiles and "loads" the input, page and draft kernels
as on a GPU, for a driver that runs nothing, so what each launch specialises on can be seen on a CPU.

Prints, for each room, how many binaries there are after steps of 1, 2, 16 and 17 sequences, with views that begin at
any address.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from load_triton_kernel import pretend_to_have_a_gpu

from attention_backends.page_kernels.device import TritonKernels as PageKernels
from compilation.counter import CompileCounter
from engine.runner.kernels import InputBuffers, StepSizes
from engine.runner.kernels.device import TritonKernels
from engine.runner.kernels.ngram_device import TritonDraftKernels

SIZES = (1, 2, 16, 17)


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def input_step(n: int) -> None:
    kernels, tables, tokens, step = TritonKernels(), int32(2, 32, 20), int32(32, 81), int32(4, 33)
    lengths = int32(32)
    out = InputBuffers(
        input_ids=zeros(256),
        positions=zeros(256),
        slot_mapping=zeros(2, 256),
        seq_lens=int32(32),
        query_start_loc=int32(33),
        logits_indices=zeros(32),
        sample_rows=zeros(32),
        sample_positions=zeros(32),
        block_tables=int32(2, 32, 20),
    )
    sizes = StepSizes(n, n + n % 3, n, n, 64, 1 + n % 3, n % 2)
    kernels.prepare_inputs(step, tokens, lengths, tables, out, sizes, 4)
    kernels.gather_block_tables(tables, step[0], out.block_tables, sizes, n)
    for known in (None, zeros(n + 1)[1:]):
        kernels.post_update(tokens, lengths, zeros(n + 1)[1:], zeros(n), zeros(n), known)
    landing = int32(400)
    for table in (tokens, zeros(3, 4), zeros(3, 4, dtype=torch.float32)):
        writes = landing[6 : 6 + 6 * n].view(torch.int64).view(n, 3)
        kernels.apply_staged_writes(table, writes, landing[: 2 * n + 200].view(table.dtype), n)


def draft_step(n: int) -> None:
    """Numbers, too, of any size."""
    tokens, lengths, most = int32(32, 81), int32(33)[1:], int32(n + 1)[1:]
    TritonDraftKernels().propose_ngram(tokens, zeros(n + 1)[1:], lengths, most, 16 * n, n)


def page_step(n: int) -> None:
    kernels, lists = PageKernels(), int32(40)
    kernels.gather_pages(int32(n, 7), lists[: n + 1], lists[n + 1 : 2 * n + 1], int32(999), 20 * n)
    qkv, cache = zeros(n, 4096, dtype=torch.bfloat16), zeros(5, 2, 8, 16, 128, dtype=torch.bfloat16)
    k, v = qkv[:, 2048:3072].unflatten(1, (8, 128)), qkv[:, 3072:].unflatten(1, (8, 128))
    kernels.write_kv(k, v, cache, zeros(n + 1)[1:], 1.0, 0.5 * n)
    kernels.copy_blocks([cache] * n, zeros(n, 2))


def variants(step: Callable[[int], None]) -> list[int]:
    counter, counts = CompileCounter(), []
    for n in SIZES:
        step(n)
        counts.append(counter.since_mark())
    return counts


def main() -> None:
    pretend_to_have_a_gpu()
    for step in (input_step, page_step, draft_step):
        print(*variants(step))


if __name__ == "__main__":
    main()
