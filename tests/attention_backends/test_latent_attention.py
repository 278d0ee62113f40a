"""Latent attention by the C++ kernels against the oracle, which makes keys and values of all heads, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from latent_case import LatentCase

from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.cpu_latents import LatentSizes, split
from attention_backends.reference import ReferenceBackend

Prepared = Callable[[Isa], CpuBackend]

LENGTHS = [(1, 1), (1, 16), (1, 17), (0, 0), (0, 5), (1, 300), (37, 37), (5, 261), (40, 90)]
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
ABSOLUTE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""twice what other caches err: queries and what they find are rounded once more, where they meet the matrix"""


def assert_matches_oracle(case: LatentCase, backend: CpuBackend) -> None:
    got = case.run(backend)
    want = case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=RELATIVE[case.dtype], atol=ABSOLUTE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_every_isa_and_dtype_gives_the_equation(cpu_backend: Prepared, isa: Isa, dtype: torch.dtype) -> None:
    backend = cpu_backend(isa)
    assert_matches_oracle(LatentCase(LENGTHS, dtype=dtype), backend)
    assert_matches_oracle(LatentCase(LENGTHS, dtype=dtype, num_heads=16, block_size=32, window=21), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        (16, (512, 64, 128, 128)),
        (5, (512, 64, 192, 256)),
        (8, (256, 64, 64, 128)),
        (1, (40, 8, 16, 24)),
        (7, (8, 8, 8, 8)),
        (4, (24, 16, 10, 7)),
    ],
    ids=str,
)
def test_sizes_of_models(
    cpu_backend: Prepared, heads: int, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    names = dict(zip(("rank", "common", "made", "value_dim"), sizes, strict=True))
    case = LatentCase([(1, 40), (9, 290), (70, 70)], num_heads=heads, dtype=dtype, **names)
    assert_matches_oracle(case, cpu_backend("auto"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_block_sizes_and_gaps(cpu_backend: Prepared, block_size: int, dtype: torch.dtype) -> None:
    case = LatentCase([*LENGTHS, (1, 700)], block_size=block_size, dtype=dtype, apart=64)
    for isa in cpu_backend("auto").supported_isas:
        assert_matches_oracle(case, cpu_backend(isa))


def test_each_sequence_goes_the_way_that_multiplies_less(
    cpu_backend: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode and the end of a long prompt with absorbed queries, a whole prompt with keys and values that are made:
    of all heads at once, and of one after another where they do not fit; of none where not even one fits."""
    case, backend = LatentCase([(1, 300), (120, 120), (5, 261)], num_heads=3, dtype=torch.bfloat16), cpu_backend("auto")
    sizes = LatentSizes(rank=64, common=16, made=24, value=40)
    for room, made in ((1 << 23, [*range(1, 121)]), (120 * 40, [*range(1, 121)]), (119 * 40, None)):
        monkeypatch.setattr("attention_backends.cpu_latents.MADE_VALUES", room)
        ways = split(backend.build_metadata(case.batch(case.block_tables())), case.block_size, sizes, lambda: 0)
        if made is None:
            assert ways is None
        else:
            assert ways is not None and ways[0] is not None
            assert ways[1].tokens.tolist() == made
            assert ways[0].tokens.tolist() == [0, *range(121, 126)]
        assert_matches_oracle(case, backend)


def test_a_token_takes_one_row_of_the_cache(cpu_backend: Prepared) -> None:
    """DeepSeek-V2: (512 + 64) numbers a layer."""
    for backend in (cpu_backend("auto"), ReferenceBackend()):
        assert torch.Size(backend.latent_cache_shape(3, 16, 576)).numel() == 3 * 16 * 576


def test_rows_that_kernels_do_not_have_are_refused(cpu_backend: Prepared) -> None:
    with pytest.raises(RuntimeError, match=r"kv_lora_rank \+ qk_rope_head_dim\) of 1024.*at most 640"):
        cpu_backend("auto").latent_cache_shape(1, 16, 1024)
