"""Run by test_sampling_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Prints one line per part that passed; raises at the first difference from the torch path.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
from device_parity import (
    KINDS,
    PARAMS,
    check_drafts,
    check_filters,
    check_mixed,
    check_prompt_logprobs,
    check_seeds,
    logits_of,
)
from quick_interpreter import quicken
from sampling_oracle import CPU, Table, apply_writes

from engine.sampling import Sampler
from engine.sampling.draw import DrawRows, Filters, _wide_mask
from engine.sampling.kernels import StepTensors
from engine.sampling.kernels.device import NUM_SUMS, TritonKernels
from engine.sampling.order import order_keys
from engine.step import RowParams


def small(vocab: int) -> TritonKernels:
    """Small chunks, so that a small vocabulary has many."""
    return TritonKernels(vocab, CPU, chunk=128, block=64)


def real(vocab: int) -> TritonKernels:
    return TritonKernels(vocab, CPU)


def check_few_rows() -> None:
    """A row alone in its batch, for each parameter set; the variants without filters and without draws too."""
    vocab = 300
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 2, (1, vocab)).astype(np.float32))
    for params in PARAMS:
        want, got = Table(vocab, 2), Table(vocab, 2, sampler=Sampler(2, vocab, CPU, 64, small(vocab)))
        for table in (want, got):
            table.add(1, params, [5, 1, 2], 2)
        assert got.step(logits, [1]).token_ids.tolist() == want.step(logits, [1]).token_ids.tolist(), params


def check_last_of_equals() -> None:
    """Of equal logits the token at the border itself can be drawn, and the one after it cannot."""
    want, got = Table(100, 12), Table(100, 12, sampler=Sampler(12, 100, CPU, 64, small(100)))
    for table in (want, got):
        for row in range(12):
            table.add(row, RowParams(seed=row, top_k=2), [1])
    drawn = got.step(torch.zeros(12, 100), range(12)).token_ids.tolist()
    assert drawn == want.step(torch.zeros(12, 100), range(12)).token_ids.tolist() and set(drawn) == {0, 1}


def check_histories() -> None:
    """Lists longer than a block, tokens outside the vocabulary, a step that is seen twice."""
    vocab, penalties = 400, {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    rng = np.random.default_rng(4)
    twin = Sampler(4, vocab, CPU, 256)
    ours = Sampler(4, vocab, CPU, 256, small(vocab))
    want, got = Table(vocab, 4, 256, sampler=twin), Table(vocab, 4, 256, sampler=ours)
    for row, length in enumerate((1, 64, 200)):
        history = rng.integers(-2, vocab + 5, length).tolist()
        for table in (want, got):
            table.add(row, RowParams(seed=0, temperature=0.0, **penalties), history, max(1, length // 2))
    for step in range(6):
        logits = torch.from_numpy(rng.normal(0, 1, (3, vocab)).astype(np.float32))
        rows = [2, 0, 1]
        for table in (want, got):
            if step == 3:  # as if the step before had been launched twice
                index = torch.tensor(rows)
                positions = torch.tensor([table.lengths[r] for r in rows])
                table.sampler.sample(logits.clone(), index, rows, positions, table.tokens)
        assert got.step(logits, rows).token_ids.tolist() == want.step(logits, rows).token_ids.tolist()
        (ids, counts, sizes, counted), twins = ours._seen.tensors(), twin._seen.tensors()
        assert torch.equal(sizes, twins[2]) and torch.equal(counted, twins[3])
        for slot, size in enumerate(sizes.tolist()):
            assert torch.equal(ids[slot, :size], twins[0][slot, :size])
            assert torch.equal(counts[slot, :size], twins[1][slot, :size])


def masks(kernels: TritonKernels, logits: np.ndarray, params: list[RowParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels keep of each row, and what the torch path keeps, bool `[m, V]`, of what can be drawn at all."""
    m, vocab = logits.shape
    sampler = Sampler(m, vocab, CPU, 8)
    for row in range(m):
        sampler.add(row, params[row], [0], 1)
    apply_writes(sampler)
    floats, ints = sampler.tables()
    rows, x = torch.arange(m), torch.from_numpy(logits)
    step = StepTensors(x, rows, rows, torch.zeros(m, 8, dtype=torch.int32), floats, ints)
    _, _, borders = kernels._scan(x, step, filtered=True)
    temperature, top_p, log_min_p = floats[:, 0], floats[:, 1], floats[:, 2]
    columns = DrawRows(x.amax(-1), temperature, log_min_p, top_p, ints[:, 1], torch.zeros(m, 2, dtype=torch.int32))
    z = (x - columns.maxima.unsqueeze(1)) / temperature.unsqueeze(1)
    want = _wide_mask(x, z, columns, Filters(min_p=True, top_p=True, top_k=max(1, int(ints[:, 1].max()))))
    assert want is not None
    keys, border, limit = order_keys(x), borders[:, :1], borders[:, 1:]
    kept = (keys > border) | ((keys == border) & (torch.arange(vocab) <= limit))
    kept &= z >= log_min_p.unsqueeze(1)
    drawable = z > -44.0  # what lies below has neither mass nor a chance
    return kept & drawable, want & drawable


def check_borders() -> int:
    """What the kernels keep is the torch path's mask, token by token, for every kind of filter and of logits."""
    vocab, m = 300, 40
    rng = np.random.default_rng(5)
    logits = np.stack([logits_of(KINDS[row % len(KINDS)], rng, vocab) for row in range(m)])
    logits[-6:] = rng.integers(0, 16, (6, vocab))  # levels fall on logits
    logits[-6:, :16] = range(16)
    filters = [(0, 0.7, 0.0), (31, 1.0, 0.0), (90, 0.5, 0.01), (299, 0.95, 0.0), (2, 0.01, 0.0), (0, 0.99, 0.2)]
    params = []
    for row in range(m):
        top_k, top_p, min_p = filters[row // len(KINDS)]
        params.append(RowParams(seed=row, temperature=0.5 + row % 4, top_k=top_k, top_p=top_p, min_p=min_p))
    kept, want = masks(TritonKernels(vocab, CPU, chunk=128, block=256), logits, params)
    assert torch.equal(kept, want), (kept != want).sum(-1)
    return int(kept.sum())


class Watched(TritonKernels):
    """Keeps the rows' exact sums, int64 `[m, NUM_SUMS]`: count above the list, mass above, mass listed, total mass,
    length of the list."""

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = super()._empty(*shape, dtype=dtype)
        if shape[1:] == (NUM_SUMS.value,):
            self.sums = tensor
        return tensor


def check_short_lists() -> int:
    """However flat a row, the border is sought in a small part of it; here 10,000 tokens in one bulk, at temperature 2,
    with and without a few far above."""
    vocab = 10_000
    logits = np.random.default_rng(8).normal(0, 1, (3, vocab)).astype(np.float32)
    logits[1, :5] = 25.0
    kernels = Watched(vocab, CPU)
    filters = ({"top_p": 0.9}, {"top_p": 0.97}, {"top_k": 3000, "top_p": 0.9999})
    params = [RowParams(seed=row, temperature=2.0, **fields) for row, fields in enumerate(filters)]
    kept, want = masks(kernels, logits, params)
    assert torch.equal(kept, want), (kept != want).sum(-1)
    longest = int(kernels.sums[:, 4].max())
    assert 0 < longest < vocab // 8
    return longest


def check_wrong_guesses() -> int:
    """The first k of a row end where top-p ends but for rounding, so surveys in float32 look above the border. Rounding
    may move it by one token too."""
    vocab, ks = 64, range(3, 60, 4)
    logits = np.full((len(ks), vocab), 1.0, np.float32)
    for row, k in enumerate(ks):
        logits[row, :k] = 2.0
    weight = float(np.exp(np.float32(-1.0)))
    params = [RowParams(seed=k, top_p=float(np.float32(k / (k + (vocab - k) * weight)))) for k in ks]
    kernels = Watched(vocab, CPU, chunk=64, block=16)
    kept, want = masks(kernels, logits, params)
    assert bool(((kept.sum(1) - want.sum(1)).abs() <= 1).all())
    p = torch.tensor([q.top_p for q in params], dtype=torch.float32).double()
    _, above, listed, total = kernels.sums[:, :4].T
    target = (total * p).ceil()
    wrong = int(((above >= target) | (above + listed < target)).sum())
    assert wrong > 0
    return wrong


def main(parts: list[str]) -> None:
    quicken()
    for part in parts:
        started = time.perf_counter()
        if part == "rows":
            check_few_rows()
            check_last_of_equals()
            check_histories()
            Sampler(1, 300, CPU, 8, small(300)).warm_up()
            result: object = check_drafts(CPU, 90, 12, small)
        elif part == "mixed":
            result = check_mixed(CPU, 257, 2, 1, small)
        elif part == "filters":
            result = (check_borders(), check_filters(CPU, 300, small), check_short_lists(), check_wrong_guesses())
        elif part == "chunks":
            result = check_mixed(CPU, 4097, 1, 1, real)
            check_prompt_logprobs(CPU, 1000, 3, small)
        else:
            result = check_seeds(CPU, 97, 40, small)
        print(f"{part} equal {result} {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
