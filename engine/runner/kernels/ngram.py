"""Drafts where the tokens are: what came after the same tokens earlier, found and written beside the table's known
tokens. Behind one interface: C++ on a CPU, NumPy where it has no compiler, Triton on CUDA.

The NumPy twin is the definition, and what the others are tested against.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from attention_backends.toolchain import BuildError
from engine.runner.kernels.ngram_host import HostDraftKernels

logger = logging.getLogger(__name__)


class DraftKernels(Protocol):
    """Returns at once on CUDA: work is queued on the current stream."""

    def propose_ngram(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        longest: int,
        shortest: int,
    ) -> torch.Tensor:
        """How many drafts each of m rows got, int32 [m]: `most[i]`, fewer where the table ends, or 0.

        tokens int32 [table rows, columns], contiguous; rows int64 [m], distinct; lengths int32 [table rows]: how many
        tokens of a row are known; most int32 [m]. Of a row with n known tokens, the longest end of `shortest` to
        `longest` tokens that is somewhere before, of equals the latest, says what may come: what came after it, over
        and over where it runs into the end. Written to `tokens[row, n : n + count]` (Saxena, prompt lookup decoding,
        2023).
        """
        ...


class SuffixKernels(DraftKernels, Protocol):
    """Those of a CPU, where recent outputs are at hand."""

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
        """As `propose_ngram`, with drafts that may be fewer than `most`.

        recent int32 [r]: other texts, each with `END` behind it. The longest end of a row's known tokens, `longest` at
        most, that is somewhere before it or in `recent`, is looked up at its `MOST_MATCHES` latest places: the token
        that came most often is drafted, of equals the smallest, then what came most often after that, while it came at
        no less than the share `least` of the places, and up to `factor` drafts for each token of the end (Oliaro et
        al., suffix decoding, 2024).
        """
        ...


def select_draft_kernels(device: torch.device, cache_dir: Path | None = None) -> DraftKernels:
    """Triton on CUDA; elsewhere see `cpu_draft_kernels`."""
    if device.type == "cuda":
        from engine.runner.kernels.ngram_device import TritonDraftKernels

        return TritonDraftKernels()
    return cpu_draft_kernels(cache_dir)


def cpu_draft_kernels(cache_dir: Path | None) -> SuffixKernels:
    """C++, built into `cache_dir`; NumPy where that is None or there is no compiler."""
    if cache_dir is not None:
        from engine.runner.kernels.ngram_native import NativeDraftKernels

        try:
            return NativeDraftKernels(cache_dir)
        except BuildError as error:
            logger.warning("drafts are looked for in NumPy, several times slower: no kernels could be built: %s", error)
    return HostDraftKernels()
