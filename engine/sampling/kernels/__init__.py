"""What a sampling step computes over the vocabulary, behind one interface: C++ on a CPU, Triton on CUDA, torch
anywhere.

The torch path is the oracle of the other two, and what a CPU without a compiler runs. All give the same tokens: hash,
order, masses and penalties are integer or correctly rounded arithmetic; only exp and log may differ in their last
bits, which shows where two scores, or a prefix and its target, differ by less than that. Triton is imported only when
a CUDA device asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from attention_backends.toolchain import BuildError
from engine.sampling.batch import BatchPlan
from engine.sampling.draw import mass_unit
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.penalties import SeenTokens

logger = logging.getLogger(__name__)


class StepTensors(msgspec.Struct, frozen=True):
    """What one step reads, all on the device."""

    logits: torch.Tensor
    """float32 `[m, V]`, contiguous; penalties change it in place"""
    rows: torch.Tensor
    """int64 `[m]`: where each place of the batch stands in the tables"""
    positions: torch.Tensor
    """int64 `[m]`: where the new token goes"""
    tokens: torch.Tensor
    """int32 `[rows, max_model_len]`"""
    floats: torch.Tensor
    """float32 `[rows, columns.NUM_FLOATS]`"""
    ints: torch.Tensor
    """int64 `[rows, columns.NUM_INTS]`"""


class SamplingKernels(Protocol):
    """Every function returns at once on CUDA: work is queued on the current stream."""

    @property
    def groups_rows(self) -> bool:
        """Whether `draw` treats rows of one kind together and needs their places; else each row's own parameters
        decide on the device."""
        ...

    @property
    def size_bytes(self) -> int:
        """Device memory held between steps."""
        ...

    def restrict(self, logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
        """Logits of tokens that are not allowed become minus infinity. `logits` float32 `[m, V]`; `bits` int32
        `[len(places), ceil(V / 32)]`, contiguous, of the rows `places`, ascending: the lowest bit is the first token.
        """
        ...

    def penalise(self, step: StepTensors, seen: SeenTokens, plan: BatchPlan) -> None:
        """For rows with penalties: count the tokens before the first position that are new, then change the logits of
        that and the following positions in place, with the drafts before each as if they had come. Drafts are not
        counted when this returns."""
        ...

    def draw(self, step: StepTensors, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 `[m]`, faults bool `[m]`) from edited logits; the token of a fault is 0."""
        ...

    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, rows: Sequence[int], ks: Sequence[int]
    ) -> LogprobTensors:
        """Score `targets` int64 `[n]` under unmodified logits float32 `[n, V]`, with `ks[j]` alternatives for
        position j."""
        ...


class KernelSignature(msgspec.Struct, frozen=True):
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `engine.sampling.kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]
    options: dict[str, int]
    """how it is launched"""


ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}
FOUR_WARPS = {"num_warps": 4, "enable_fp_fusion": False}
EIGHT_WARPS = {"num_warps": 8, "enable_fp_fusion": False}
"""for kernels that compute more than they read: with 8 tokens a thread, registers are few enough to hide latency"""

_CHUNK, _BLOCK = 2048, 1024
_ROW = {"logits": "*fp32", "rows": "*i64", "floats": "*fp32", "ints": "*i64", "chunk_keys": "*i32"}
_SURVEYS = {"chunk_lows": "*fp32", "counts": "*i32", "masses": "*fp32"}
_SCAN = {"logits": "*fp32", "chunk_keys": "*i32", "chunk_ids": "*i32", **_SURVEYS, "sums": "*i64"}
_LISTED = {"sums": "*i64", "spans": "*fp32", "listed": "*i64"}
_DRAW = {**_ROW, "positions": "*i64", "borders": "*i32", "scores": "*fp32", "ids": "*i32"}
_FINISH = {
    "chunk_keys": "*i32", "chunk_ids": "*i32", "rows": "*i64", "floats": "*fp32", "scores": "*fp32", "ids": "*i32",
    "tokens": "*i64", "faults": "*i1",
}  # fmt: skip
_PENALISE = {
    "logits": "*fp32", "rows": "*i64", "positions": "*i64", "count": "i32", "tokens": "*i32", "tokens_stride": "i32",
    "floats": "*fp32", "ints": "*i64", "seen": "*i32", "counts": "*i32", "sizes": "*i64", "counted": "*i64",
    "capacity": "i32",
}  # fmt: skip
_SCORE = {
    "logits": "*fp32", "targets": "*i64", "maxima": "*fp32", "sums": "*fp32", "greater": "*i32", "candidates": "*i64",
}  # fmt: skip
_SCORED = {"ids": "*i64", "logprobs": "*fp32", "ranks": "*i64", "totals": "*fp32"}


def _signatures(vocab: int) -> Iterator[KernelSignature]:
    chunks = -(-vocab // _CHUNK)
    chunked = {"VOCAB": vocab, "CHUNK": _CHUNK, "CHUNKS": chunks}
    padded = {"CHUNKS": chunks, "PADDED": 1 << (chunks - 1).bit_length()}
    shapes, exact = {**chunked, **padded}, {"UNIT": mass_unit(vocab), "CAPACITY": vocab // 8}
    for flag in (0, 1):
        yield KernelSignature("scan_kernel", _SCAN, {**chunked, "FILTERED": flag}, FOUR_WARPS)
        yield KernelSignature("draw_kernel", _DRAW, {**shapes, "FILTERED": flag}, EIGHT_WARPS)
        yield KernelSignature("finish_kernel", _FINISH, {**padded, "DRAWN": flag}, ONE_WARP)
        yield KernelSignature("survey_kernel", {**_ROW, **_SURVEYS}, {**shapes, "SURVEY": flag}, EIGHT_WARPS)
    listing, searched = {**_ROW, **_SURVEYS, **_LISTED}, {**_ROW, **_LISTED, "borders": "*i32"}
    yield KernelSignature("gather_kernel", listing, {**shapes, **exact}, EIGHT_WARPS)
    searching = {"VOCAB": vocab, **padded, **exact, "BLOCK": _BLOCK}
    yield KernelSignature("select_kernel", searched, searching, EIGHT_WARPS)
    yield KernelSignature("penalise_kernel", _PENALISE, {"VOCAB": vocab, "BLOCK": _BLOCK}, FOUR_WARPS)
    yield KernelSignature("score_chunks_kernel", {**_SCORE, "columns": "i32"}, chunked, FOUR_WARPS)
    finishing = {"VOCAB": vocab, **padded, "FLAT": 32 * padded["PADDED"]}
    yield KernelSignature("score_finish_kernel", {**_SCORE, **_SCORED, "columns": "i32"}, finishing, FOUR_WARPS)


KERNELS: tuple[KernelSignature, ...] = tuple(_signatures(151_936))
"""Discovery table: `tools/compile_triton.py` compiles every entry for the supported GPUs without one. The vocabulary
is a constant of the compiled code: here that of Qwen3."""


def select_kernels(device: torch.device, vocab_size: int, cache_dir: Path | None = None) -> SamplingKernels:
    """The implementation for `device`: Triton on CUDA; on a CPU C++, built into `cache_dir`, and torch where that is
    None or there is no compiler; torch elsewhere."""
    if device.type == "cuda":
        from engine.sampling.kernels.device import TritonKernels

        return TritonKernels(vocab_size, device)
    from engine.sampling.kernels.host import HostKernels

    if device.type == "cpu" and cache_dir is not None:
        from engine.sampling.kernels.native import MAX_VOCAB, NativeKernels

        try:
            if vocab_size <= MAX_VOCAB:
                return NativeKernels(vocab_size, cache_dir)
        except BuildError as error:
            logger.warning("sampling runs in torch, several times slower: its kernels could not be built: %s", error)
    return HostKernels(vocab_size, device)
