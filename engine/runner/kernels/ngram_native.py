"""Drafts in C++ (`csrc/`), compiled on this machine once: what a CPU engine runs where there is a compiler.

Why not NumPy: it makes an array of every place with the right last token, for each token of the match again. Here a
row is read once, from its end back, until nothing longer can come.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from attention_backends.crew import load_library
from attention_backends.native_build import build, build_for_this_cpu
from engine.draft_sources import sources

Isa = Literal["auto", "portable", "avx2", "avx512"]
ISAS: tuple[Isa, ...] = ("auto", "portable", "avx2", "avx512")


class NativeDraftKernels:
    """See `SuffixKernels`. `isa` forces one instruction set; "auto" takes the widest that this CPU has.

    The constructor builds (once per machine, a few seconds) and loads the library. Raises BuildError; RuntimeError if
    the CPU lacks `isa`.
    """

    def __init__(self, cache_dir: Path, isa: Isa = "auto") -> None:
        library = (build_for_this_cpu if isa == "auto" else build)(sources(), cache_dir)
        ops, _ = load_library(library, cache_dir)
        mask = ops.supported_isas()
        self.supported_isas: tuple[Isa, ...] = tuple(name for i, name in enumerate(ISAS) if mask >> i & 1)
        if isa != "auto" and isa not in self.supported_isas:
            raise RuntimeError(f"this CPU (or compiler) has {', '.join(self.supported_isas)}, not {isa}")
        self._isa = ISAS.index(isa)
        self._ngram, self._suffix = ops.propose_ngram.default, ops.propose_suffix.default

    def propose_ngram(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        longest: int,
        shortest: int,
    ) -> torch.Tensor:
        counts = torch.empty(len(rows), dtype=torch.int32)
        self._ngram(tokens, rows, lengths, most, longest, shortest, counts, self._isa)
        return counts

    def propose_suffix(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        recent: torch.Tensor,
        longest: int,
        factor: float,
        least: float,
    ) -> torch.Tensor:
        counts = torch.empty(len(rows), dtype=torch.int32)
        self._suffix(tokens, rows, lengths, most, recent, longest, factor, least, counts, self._isa)
        return counts
