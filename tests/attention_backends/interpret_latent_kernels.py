"""Run by test_latent_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

The `cuda` backend's latent layers against the oracle, which makes keys and values of all heads in float64: shuffled
pages, NaN in unwritten slots and between blocks. Prints one line per case that passed; raises on the first that
differs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1]))

import torch
from latent_case import LatentCase
from quick_interpreter import quicken
from test_cuda_backend import Recorder

from attention_backends import cuda_latents
from attention_backends.cuda import CudaBackend
from attention_backends.interface import AttentionSpec
from attention_backends.reference import ReferenceBackend

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8}
MIXED = [(1, 1), (1, 16), (1, 17), (0, 5), (1, 300), (37, 37), (5, 261), (40, 90)]


def backend_of(dtype: torch.dtype, processors: int) -> CudaBackend:
    backend = CudaBackend(Recorder(), processors)
    backend.bind(AttentionSpec(torch.device("cpu"), dtype, dtype, ()))
    return backend


def check(name: str, case: LatentCase, processors: int = 8) -> None:
    got = case.run(backend_of(case.dtype, processors), case.dtype)
    want = case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    print(f"{name} equal", flush=True)


def check_replay() -> None:
    """A graph's launches with other lengths in the same buffers: nothing else of the step is looked at."""
    case = LatentCase([(1, 300), (1, 17), (1, 90)], dtype=torch.float16, graph_size=5)
    backend, q, rows = backend_of(case.dtype, 8), *case.qkv()[:2]
    batch = case.batch(case.block_tables())
    capture = replace(batch, max_seq_len=1, seq_lens_host=[1, 1, 1])
    outs = []
    for each in (batch, capture):
        cache = torch.zeros(case.cache_shape(backend), dtype=case.dtype)
        out = torch.full((case.num_tokens, case.num_heads, case.value_dim), 7.0, dtype=case.dtype)
        backend.forward(q, rows, rows, out, cache, case.layer, backend.build_metadata(each))
        outs.append(out)
    assert torch.equal(*outs)
    assert (outs[0][3:] == 0).all() and (outs[0][:3] != 0).any()
    print("replay equal", flush=True)


def check_nan_stays_in_its_sequence() -> None:
    case = LatentCase([(1, 70), (3, 40), (1, 9)], dtype=torch.float16)
    backend, q, rows = backend_of(case.dtype, 8), *case.qkv()[:2]
    q[1] = float("nan")
    cache = torch.zeros(case.cache_shape(backend), dtype=case.dtype)
    out = torch.empty(case.num_tokens, case.num_heads, case.value_dim, dtype=case.dtype)
    backend.forward(q, rows, rows, out, cache, case.layer, backend.build_metadata(case.batch(case.block_tables())))
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False, False, False]
    print("nan equal", flush=True)


def main() -> None:
    """All that differs with the dtype is how values are rounded, and float32 tells most: by default float16 is asked
    less."""
    quicken()
    exhaustive = "exhaustive" in sys.argv
    for dtype in (torch.float32, torch.float16):
        check(f"{dtype} mixed", LatentCase(MIXED, dtype=dtype))
        if dtype == torch.float16 and not exhaustive:
            break
        check(f"{dtype} one split", LatentCase(MIXED, dtype=dtype, apart=64, block_size=32), processors=1)
        check(f"{dtype} window", LatentCase(MIXED, dtype=dtype, window=21, num_heads=5))
        check(f"{dtype} decode", LatentCase([(1, 300), (1, 1), (1, 95)], dtype=dtype, num_heads=16, seed=4))
        check(f"{dtype} verify", LatentCase([(4, 300), (4, 4), (3, 95)], dtype=dtype, num_heads=3, seed=5))
        tiny: dict[str, Any] = {"rank": 16, "common": 8, "made": 16, "value_dim": 16}
        check(f"{dtype} tiny", LatentCase(MIXED, dtype=dtype, **tiny))
        odd: dict[str, Any] = {"rank": 40, "common": 24, "made": 10, "value_dim": 7}
        check(f"{dtype} graph", LatentCase([(1, 300), (1, 17)], dtype=dtype, graph_size=4, **odd))
        with patch.object(cuda_latents, "MOST_ROWS", 200):
            check(f"{dtype} some heads at a time", LatentCase(MIXED, dtype=dtype))
    large: dict[str, Any] = {"rank": 512, "common": 64, "made": 128, "value_dim": 128, "num_heads": 20}
    check("sizes of models", LatentCase([(1, 100), (5, 70)], dtype=torch.float16, **large))
    check_replay()
    check_nan_stays_in_its_sequence()


if __name__ == "__main__":
    main()
