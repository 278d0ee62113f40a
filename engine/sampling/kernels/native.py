"""The sampling step in C++ (`csrc/`), compiled on this machine once: what a CPU engine runs where there is a compiler.

Why not torch: the torch path reads and writes the vocabulary a dozen times for one filter and takes a dozen operators
even for one greedy row. Here a row is read once from memory; what follows finds it in a core's cache, or looks at a few
blocks of it only. Each row's own parameters decide, so a step is one call, whatever it mixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from attention_backends.crew import load_library
from attention_backends.native_build import build, build_for_this_cpu
from engine.sampling.batch import BatchPlan
from engine.sampling.kernels import StepTensors
from engine.sampling.logprobs import LogprobTensors, empty_scores, score
from engine.sampling.penalties import SeenTokens
from engine.sampling_sources import sources

Isa = Literal["auto", "portable", "avx2", "avx512"]
ISAS: tuple[Isa, ...] = ("auto", "portable", "avx2", "avx512")
MAX_VOCAB = 1 << 22
MAX_COLUMNS = 2048
"""alternatives up to which log-probabilities are native"""


class NativeKernels:
    """See `SamplingKernels`. `isa` forces one instruction set; "auto" takes the widest that this CPU has.

    The constructor builds (once per machine, a few seconds) and loads the library. Raises BuildError; RuntimeError if
    the CPU lacks `isa`; ValueError for a vocabulary above `MAX_VOCAB`.
    """

    groups_rows = False
    size_bytes = 0

    def __init__(self, vocab_size: int, cache_dir: Path, isa: Isa = "auto") -> None:
        if not 1 <= vocab_size <= MAX_VOCAB:
            raise ValueError(f"sampling kernels take vocabularies of 1 to {MAX_VOCAB} tokens, not {vocab_size}")
        library = (build_for_this_cpu if isa == "auto" else build)(sources(), cache_dir)
        ops, _ = load_library(library, cache_dir)
        mask = ops.supported_isas()
        self.supported_isas: tuple[Isa, ...] = tuple(name for i, name in enumerate(ISAS) if mask >> i & 1)
        if isa != "auto" and isa not in self.supported_isas:
            raise RuntimeError(f"this CPU (or compiler) has {', '.join(self.supported_isas)}, not {isa}")
        self._vocab = vocab_size
        self._isa = ISAS.index(isa)
        self._draw, self._score, self._penalise = ops.draw.default, ops.score.default, ops.penalise.default
        self._restrict = ops.restrict.default

    def restrict(self, logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
        self._restrict(logits, torch.tensor(places, dtype=torch.int64), torch.from_numpy(bits), self._isa)

    def penalise(self, step: StepTensors, seen: SeenTokens, plan: BatchPlan) -> None:
        table = (step.tokens, step.floats, step.ints)
        self._penalise(step.logits, step.rows, step.positions, *table, *seen.tensors(), self._isa)

    def draw(self, step: StepTensors, plan: BatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
        m = len(step.rows)
        token_ids, faults = torch.empty(m, dtype=torch.int64), torch.empty(m, dtype=torch.bool)
        self._draw(step.logits, step.rows, step.positions, step.floats, step.ints, token_ids, faults, self._isa)
        return token_ids, faults

    def score(
        self, logits: torch.Tensor, targets: torch.Tensor, rows: Sequence[int], ks: Sequence[int]
    ) -> LogprobTensors:
        if not ks:
            return empty_scores(logits.device)
        widths = tuple(1 + min(k, self._vocab) for k in ks)
        n, width = len(ks), max(widths)
        if width - 1 > MAX_COLUMNS:
            return score(logits, targets, rows, ks)
        ids, ranks = torch.empty((n, width), dtype=torch.int64), torch.empty(n, dtype=torch.int64)
        logprobs = torch.empty((n, width), dtype=torch.float32)
        self._score(logits.contiguous(), targets.contiguous(), ids, logprobs, ranks, self._isa)
        return LogprobTensors(tuple(rows), widths, ids, logprobs, ranks)
