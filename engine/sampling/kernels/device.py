"""Launches the Triton kernels of a sampling step. Importing this module needs Triton; `select_kernels` does so only
for CUDA.

Nothing that changes between steps is part of the compiled code: rows are the grid, sizes are read on the device, and
the vocabulary is a constant. So `Sampler.warm_up` compiles everything there is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from engine.sampling.batch import BatchPlan
from engine.sampling.draw import mass_unit
from engine.sampling.grammar_masks import restrict
from engine.sampling.kernels import EIGHT_WARPS, FOUR_WARPS, ONE_WARP, StepTensors
from engine.sampling.kernels.device_draw import draw_kernel, finish_kernel, scan_kernel
from engine.sampling.kernels.device_math import LEVELS, NUM_SUMS, SURVEYS
from engine.sampling.kernels.device_score import penalise_kernel, score_chunks_kernel, score_finish_kernel
from engine.sampling.kernels.device_select import gather_kernel, select_kernel, survey_kernel
from engine.sampling.logprobs import LogprobTensors, empty_scores
from engine.sampling.order import top_ids
from engine.sampling.penalties import SeenTokens

__all__ = [
    "TritonKernels",
    "draw_kernel",
    "finish_kernel",
    "gather_kernel",
    "penalise_kernel",
    "scan_kernel",
    "score_chunks_kernel",
    "score_finish_kernel",
    "select_kernel",
    "survey_kernel",
]

MAX_FUSED_COLUMNS = 32
"""alternatives up to which log-probabilities are one pass; more take `top_ids`"""
_SCORED_ROWS = 1024
"""rows of one launch: bounds the candidates of a long prompt's log-probabilities"""


class TritonKernels:
    """See `SamplingKernels`. `chunk`: tokens of one program, a power of two; tests take small ones."""

    groups_rows = False
    size_bytes = 8

    def __init__(self, vocab_size: int, device: torch.device, chunk: int = 2048, block: int = 1024) -> None:
        chunks = triton.cdiv(vocab_size, chunk)
        self._vocab, self._device, self._chunks = vocab_size, device, chunks
        # Less than the vocabulary: Triton 3.6 fails an assertion on a loop over blocks that cannot go round twice.
        self._block = min(block, 1 << max((vocab_size - 1).bit_length() - 1, 0))
        self._chunk = chunk
        self._capacity = max(vocab_size // 8, 1)
        self._chunked = {"VOCAB": vocab_size, "CHUNK": chunk, "CHUNKS": chunks}
        self._padded = {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks)}
        self._shapes = {**self._chunked, **self._padded}
        self._unit = mass_unit(vocab_size)
        self._no_sums = torch.empty(1, dtype=torch.int64, device=device)

    def restrict(self, logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
        restrict(logits, places, bits)

    def penalise(self, step: StepTensors, seen: SeenTokens, plan: BatchPlan) -> None:
        ids, counts, sizes, counted = seen.tensors()
        penalise_kernel[(len(step.rows),)](
            step.logits,
            step.rows,
            step.positions,
            len(step.rows),
            step.tokens,
            step.tokens.stride(0),
            step.floats,
            step.ints,
            ids,
            counts,
            sizes,
            counted,
            ids.shape[1],
            VOCAB=self._vocab,
            BLOCK=self._block,
            **FOUR_WARPS,
        )

    def draw(self, step: StepTensors, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        logits, m = _aligned(step.logits), len(step.rows)
        tokens = self._empty(m, dtype=torch.int64)
        faults = self._empty(m, dtype=torch.bool)
        if m == 0:
            return tokens, faults
        filtered = any(group.filters.top_k or group.filters.top_p for group in plan.draws)
        keys, firsts, borders = self._scan(logits, step, filtered)
        scores, ids = keys.view(torch.float32), firsts  # not read unless there are draws
        if plan.draws:
            shape = keys.shape
            scores, ids = self._empty(*shape, dtype=torch.float32), self._empty(*shape, dtype=torch.int32)
            draw_kernel[shape](
                logits, step.rows, step.floats, step.ints, keys, step.positions, borders, scores, ids,
                FILTERED=int(filtered), **self._shapes, **EIGHT_WARPS,
            )  # fmt: skip
        finish_kernel[(m,)](
            keys, firsts, step.rows, step.floats, scores, ids, tokens, faults,
            DRAWN=int(bool(plan.draws)), **self._padded, **ONE_WARP,
        )  # fmt: skip
        return tokens, faults

    def _scan(
        self, logits: torch.Tensor, step: StepTensors, filtered: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Largest order key and first id of each chunk, int32 `[m, chunks]`; where top-k and top-p end in each row,
        int32 `[m, 2]`, and anything where no row has one."""
        m = logits.shape[0]
        grid = (m, self._chunks)
        keys, firsts = self._empty(*grid, dtype=torch.int32), self._empty(*grid, dtype=torch.int32)
        if not filtered:
            unused = keys.view(torch.float32)
            scan_kernel[grid](
                logits, keys, firsts, unused, keys, unused, self._no_sums, FILTERED=0, **self._chunked, **FOUR_WARPS
            )
            return keys, firsts, keys
        lows = self._empty(*grid, dtype=torch.float32)
        surveys = (m, SURVEYS.value, LEVELS.value)
        counts, masses = self._empty(*surveys, dtype=torch.int32), self._empty(*surveys, dtype=torch.float32)
        sums, spans = self._empty(m, NUM_SUMS.value, dtype=torch.int64), self._empty(m, 2, dtype=torch.float32)
        listed = self._empty(m, self._capacity, dtype=torch.int64)
        borders = self._empty(m, 2, dtype=torch.int32)
        row = (logits, step.rows, step.floats, step.ints, keys)
        surveyed = (*row, lows, counts, masses)
        exact = {"VOCAB": self._vocab, **self._padded, "UNIT": self._unit, "CAPACITY": self._capacity}
        scan_kernel[grid](logits, keys, firsts, lows, counts, masses, sums, FILTERED=1, **self._chunked, **FOUR_WARPS)
        for survey in range(SURVEYS.value):
            survey_kernel[grid](*surveyed, SURVEY=survey, **self._shapes, **EIGHT_WARPS)
        gather_kernel[grid](*surveyed, sums, spans, listed, CHUNK=self._chunk, **exact, **EIGHT_WARPS)
        select_kernel[(m,)](
            *row, sums, spans, listed, borders,
            BLOCK=self._block, **exact, **EIGHT_WARPS,
        )  # fmt: skip
        return keys, firsts, borders

    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, rows: Sequence[int], ks: Sequence[int]
    ) -> LogprobTensors:
        if not ks:
            return empty_scores(self._device)
        widths = tuple(1 + min(k, self._vocab) for k in ks)
        n, columns = len(ks), max(widths) - 1
        ids = self._empty(n, 1 + columns, dtype=torch.int64)
        logprobs = self._empty(n, 1 + columns, dtype=torch.float32)
        ranks = self._empty(n, dtype=torch.int64)
        for start in range(0, n, _SCORED_ROWS):
            part = slice(start, min(start + _SCORED_ROWS, n))
            out = (ids[part], logprobs[part], ranks[part])
            if columns <= MAX_FUSED_COLUMNS:
                self._score(logits[part], targets[part], columns, *out)
            else:
                self._score_many(logits[part], targets[part], columns, *out)
        return LogprobTensors(tuple(rows), widths, ids, logprobs, ranks)

    def _score(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        columns: int,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        ranks: torch.Tensor,
    ) -> torch.Tensor:
        """Fill ids, logprobs `[n, 1 + columns]` and ranks `[n]`; returns the rows' log-sum-exp float32 `[n]`."""
        logits, n = _aligned(logits), logits.shape[0]
        shape = (n, self._chunks)
        maxima, sums = self._empty(*shape, dtype=torch.float32), self._empty(*shape, dtype=torch.float32)
        greater = self._empty(*shape, dtype=torch.int32)
        candidates = self._empty(*shape, max(columns, 1), dtype=torch.int64)
        totals = self._empty(n, dtype=torch.float32)
        row = (logits, targets, maxima, sums, greater, candidates)
        score_chunks_kernel[shape](*row, columns, **self._chunked, **FOUR_WARPS)
        score_finish_kernel[(n,)](
            *row, ids, logprobs, ranks, totals, columns,
            VOCAB=self._vocab, FLAT=MAX_FUSED_COLUMNS * self._padded["PADDED"], **self._padded, **FOUR_WARPS,
        )  # fmt: skip
        return totals

    def _score_many(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        columns: int,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        ranks: torch.Tensor,
    ) -> None:
        n = logits.shape[0]
        chosen, chosen_logprobs = self._empty(n, 1, dtype=torch.int64), self._empty(n, 1, dtype=torch.float32)
        totals = self._score(logits, targets, 0, chosen, chosen_logprobs, ranks)
        first = top_ids(logits, columns)
        torch.cat((chosen, first), dim=1, out=ids)
        torch.cat((chosen_logprobs, logits.gather(1, first) - totals.unsqueeze(1)), dim=1, out=logprobs)

    def _empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Kernels are compiled for rows that begin where the allocator begins: a slice of an odd vocabulary would compile
    another one."""
    return logits if logits.data_ptr() % 16 == 0 else logits.clone()
