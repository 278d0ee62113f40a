"""Run by test_input_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Every Triton kernel and its twin work on copies of the same random tables, and all of memory is compared afterwards, so
a store outside of what a kernel owns is seen too. Prints one line per case that passed; raises on the first that
differs.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
from quick_interpreter import quicken

from engine.runner.kernels import InputBuffers, StepSizes
from engine.runner.kernels.device import TritonKernels
from engine.runner.kernels.host import HostKernels

ROWS, LENGTH, GROUPS, BLOCK = 9, 80, 2, 4


def triton_kernels(rng: np.random.Generator) -> TritonKernels:
    """Now and then with blocks so small that a sequence takes several programs, and each of them several turns."""
    return TritonKernels() if rng.random() < 0.3 else TritonKernels(block=4, parts=int(rng.integers(1, 5)))


def buffers(max_tokens: int, max_seqs: int, max_blocks: int) -> InputBuffers:
    """Filled with a value no kernel writes."""

    def full(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -77, dtype=dtype)

    return InputBuffers(
        input_ids=full(max_tokens),
        positions=full(max_tokens),
        slot_mapping=full(GROUPS, max_tokens),
        seq_lens=full(max_seqs, dtype=torch.int32),
        query_start_loc=full(max_seqs + 1, dtype=torch.int32),
        logits_indices=full(max_seqs),
        sample_rows=full(max_seqs),
        sample_positions=full(max_seqs),
        block_tables=full(GROUPS, max_seqs, max_blocks, dtype=torch.int32),
    )


def query_lens(rng: np.random.Generator, n: int, case: int) -> np.ndarray:
    """Decodes, mixtures, and requests of up to six samples: a fork has no query and samples from the row before it.
    Where prompts are cached or short, there are fewer tokens than sequences."""
    if case % 3 == 0:
        return np.ones(n, np.int32)
    longest = 20 if case % 2 else 4
    query = rng.integers(1, longest, n).astype(np.int32)
    if case % 3 == 1:
        samples = int(rng.integers(2, 7))
        query[np.arange(n) % samples > 0] = 0
    return query


def check_prepare_and_gather(rng: np.random.Generator, case: int) -> None:
    n = int(rng.integers(1, ROWS + 1))
    decode_only = case % 3 == 0
    query = query_lens(rng, n, case)
    computed = rng.integers(0, LENGTH - 20, n).astype(np.int32)
    samples = np.ones(n, bool) if decode_only else rng.random(n) < 0.6
    total, max_tokens, max_blocks = int(query.sum()), 256, -(-LENGTH // BLOCK)
    sizes = StepSizes(
        n,
        total,
        int(samples.sum()),
        padded_seqs=int(rng.integers(n, ROWS + 1)),
        padded_tokens=int(rng.integers(total, max_tokens)),
        max_query_len=int(query.max()),
        padded_query_len=case % 2,
    )
    step = torch.zeros(4, ROWS + 1, dtype=torch.int32)
    step[0, :n] = torch.from_numpy(rng.permutation(ROWS)[:n])
    lengths = rng.integers(1, LENGTH - 24, ROWS).astype(np.int32)
    ahead, unsure = rng.integers(0, 4, n), rng.random(n) < (0.3 if case % 2 else 0.0)
    computed = np.where(unsure, lengths[step[0, :n].numpy()] - 1 + ahead, computed).astype(np.int32)
    step[1, :n] = torch.from_numpy(np.where(unsure, ~ahead, computed).astype(np.int32))
    step[2, 1 : n + 1] = torch.from_numpy(np.cumsum(query))
    step[3, :n] = torch.from_numpy(np.where(samples, np.cumsum(samples) - 1, -1))
    tokens = torch.from_numpy(rng.integers(0, 1000, (ROWS, LENGTH)).astype(np.int32))
    tables = torch.from_numpy(rng.integers(0, 500, (GROUPS, ROWS, max_blocks)).astype(np.int32))
    results = []
    for kernels in (triton_kernels(rng), HostKernels()):
        out = buffers(max_tokens, ROWS, max_blocks)
        kernels.prepare_inputs(step, tokens, torch.from_numpy(lengths), tables, out, sizes, BLOCK)
        columns = -(-int((computed + query).max()) // BLOCK)
        kernels.gather_block_tables(tables, step[0], out.block_tables, sizes, columns)
        results.append(out)
    for field in fields(InputBuffers):
        ours, twin = (getattr(r, field.name) for r in results)
        torch.testing.assert_close(ours, twin, rtol=0, atol=0, msg=lambda m, f=field: f"{f.name}: {m}")
    step[1, :n] = torch.from_numpy(computed)
    check_against_loop(results[1], step, tokens, tables, sizes)


def check_against_loop(
    out: InputBuffers, step: torch.Tensor, tokens: torch.Tensor, tables: torch.Tensor, sizes: StepSizes
) -> None:
    """The definition, one token at a time."""
    rows, computed, starts, sample_index = step.tolist()
    for i in range(sizes.num_seqs):
        query = starts[i + 1] - starts[i]
        assert out.seq_lens[i] == computed[i] + query
        assert out.query_start_loc[i : i + 2].tolist() == starts[i : i + 2]
        for j in range(query):
            at, position = starts[i] + j, computed[i] + j
            assert out.input_ids[at] == tokens[rows[i], position]
            assert out.positions[at] == position
            for g in range(GROUPS):
                block = int(tables[g, rows[i], position // BLOCK])
                assert out.slot_mapping[g, at] == block * BLOCK + position % BLOCK
        if sample_index[i] >= 0:
            assert out.logits_indices[sample_index[i]] == starts[i + 1] - 1
            assert out.sample_rows[sample_index[i]] == rows[i]
            assert out.sample_positions[sample_index[i]] == computed[i] + query
    tail = slice(sizes.num_tokens, sizes.padded_tokens)
    assert not out.input_ids[tail].any() and (out.slot_mapping[:, tail] == -1).all()
    assert (out.slot_mapping[:, sizes.padded_tokens :] == -77).all()
    assert not out.seq_lens[sizes.num_seqs : sizes.padded_seqs].any()
    ends = [total_at(sizes, seq) for seq in range(sizes.num_seqs, sizes.padded_seqs + 1)]
    assert out.query_start_loc[sizes.num_seqs : sizes.padded_seqs + 1].tolist() == ends
    assert (out.query_start_loc[sizes.padded_seqs + 1 :] == -77).all()


def total_at(sizes: StepSizes, seq: int) -> int:
    """Query tokens before the padded sequence `seq`."""
    return sizes.num_tokens + (seq - sizes.num_seqs) * sizes.padded_query_len


def check_staged_writes(rng: np.random.Generator, dtype: torch.dtype) -> None:
    table = torch.from_numpy(rng.integers(0, 99, (ROWS, LENGTH))).to(dtype)
    writes, values, at = [], [], 8
    for row in rng.permutation(ROWS)[: int(rng.integers(1, ROWS + 1))]:
        length = int(rng.integers(1, LENGTH))
        start = int(rng.integers(0, LENGTH - length + 1))
        writes.append((int(row) * LENGTH + start, at, length))
        values.append(torch.from_numpy(rng.integers(100, 999, length)).to(dtype))
        at += length
    header = torch.tensor(writes, dtype=torch.int64)
    source = torch.cat((torch.zeros(8, dtype=dtype), *values))
    expected, tables = table.clone(), [table.clone(), table.clone()]
    for (dst, _, length), value in zip(writes, values):
        expected.view(-1)[dst : dst + length] = value
    for kernels, target in zip((triton_kernels(rng), HostKernels()), tables):
        kernels.apply_staged_writes(target, header, source, max(w[2] for w in writes))
        torch.testing.assert_close(target, expected, rtol=0, atol=0)


def check_post_update(rng: np.random.Generator) -> None:
    m = int(rng.integers(1, ROWS + 1))
    rows = torch.from_numpy(rng.permutation(ROWS)[:m])
    positions = torch.from_numpy(rng.integers(0, LENGTH, m))
    ids = torch.from_numpy(rng.integers(0, 50_000, m))
    tables = [torch.zeros(ROWS, LENGTH, dtype=torch.int32) for _ in range(3)]
    lengths = [torch.zeros(ROWS, dtype=torch.int32) for _ in range(3)]
    known = None if rng.random() < 0.5 else torch.from_numpy(rng.integers(1, LENGTH, m))
    TritonKernels().post_update(tables[0], lengths[0], rows, positions, ids, known)
    HostKernels().post_update(tables[1], lengths[1], rows, positions, ids, known)
    for index, (row, position, token) in enumerate(zip(rows.tolist(), positions.tolist(), ids.tolist())):
        tables[2][row, position] = token
        lengths[2][row] = position + 1 if known is None else known[index]
    for found in (tables, lengths):
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def main() -> None:
    quicken()
    rng = np.random.default_rng(int(sys.argv[1]))
    for case in range(12):
        check_prepare_and_gather(rng, case)
        for dtype in (torch.int32, torch.int64, torch.float32):
            check_staged_writes(rng, dtype)
        check_post_update(rng)
        print(f"case {case} equal", flush=True)


if __name__ == "__main__":
    main()
