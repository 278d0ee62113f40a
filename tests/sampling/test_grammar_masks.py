"""Masks from the host: only what they allow is ever sampled, in C++ for each instruction set and in torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backends.toolchain import default_cache_dir
from engine.sampling.kernels import SamplingKernels
from engine.sampling.kernels.host import HostKernels
from engine.sampling.kernels.native import ISAS, NativeKernels

VOCABS = (1, 31, 32, 33, 100, 513, 2049)


def kernels_of(name: str, vocab_size: int) -> SamplingKernels:
    if name == "torch":
        return HostKernels(vocab_size, torch.device("cpu"))
    try:
        return NativeKernels(vocab_size, Path(default_cache_dir()), name)  # type: ignore[arg-type]
    except RuntimeError as error:
        pytest.skip(str(error))


def bits_of(allowed: np.ndarray) -> np.ndarray:
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("name", ["torch", *ISAS])
@given(st.integers(1, 5), st.sampled_from(VOCABS), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_what_is_not_allowed_is_impossible_and_nothing_else_changes(
    name: str, rows: int, vocab_size: int, seed: int, density: float
) -> None:
    random = np.random.default_rng(seed)
    places = sorted(random.choice(rows, random.integers(1, rows + 1), replace=False).tolist())
    allowed = random.random((len(places), vocab_size)) < density
    logits = torch.from_numpy(random.standard_normal((rows, vocab_size)).astype(np.float32))
    expected = logits.clone()
    for place, may in zip(places, allowed, strict=True):
        expected[place][torch.from_numpy(~may)] = float("-inf")
    kernels_of(name, vocab_size).restrict(logits, places, bits_of(allowed))
    assert torch.equal(logits, expected)


def test_the_widths_of_masks_are_checked() -> None:
    kernels = kernels_of("portable", 100)
    with pytest.raises(RuntimeError, match="bits"):
        kernels.restrict(torch.zeros(2, 100), [0, 1], np.zeros((2, 3), dtype=np.int32))
    with pytest.raises(RuntimeError, match="place"):
        kernels.restrict(torch.zeros(2, 100), [0, 2], np.zeros((2, 4), dtype=np.int32))
