"""The small-batch linear kernels: equal to float64 under the interpreter, compilable, with enough bytes in flight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.kernels import (
    BUCKETS,
    MAX_ROWS,
    SPLITS,
    TILES,
    Plan,
    bucket_of,
    decode,
    encode,
    plans_for,
)

HERE = Path(__file__).parent
H200_MULTIPROCESSORS = 132
NEEDED_IN_FLIGHT = 40 << 10
"""bytes per multiprocessor, by Little's law"""
LAYERS = {  # n, k
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (24576, 4096),
    "8b down": (4096, 12288),
    "8b lm_head": (151936, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b down": (1024, 3072),
    "llama 8b down": (4096, 14336),
}


def run(arguments: list[str], **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["matvec", "matmul"])
def test_kernels_equal_float64_for_odd_sizes_and_rows_are_independent(kind: str) -> None:
    pytest.importorskip("triton")
    printed = run([str(HERE / "interpret_linear_kernels.py"), kind], TRITON_INTERPRET="1")
    tiles = sum(tile.kind == kind for tile in TILES)
    assert printed.count("equal") == tiles + (2 if kind == "matmul" else 1)


def test_weights_move_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    """As the code is compiled for a real model: k a multiple of 16, with or without a last partial block."""
    pytest.importorskip("triton")
    script = [str(HERE / "compile_linear_tiles.py"), "90"]
    printed = run(script, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    found = [json.loads(line) for line in printed.splitlines()]
    assert len(found) == len(TILES)
    for row in found:
        tile = next(tile for tile in TILES if tile.name == row["tile"])
        wide = row["copies_16"] if tile.stages > 1 else row["loads_16"]
        assert row["loads"] - wide <= tile.stages  # a narrow block of x is less than 16 bytes a thread
        assert wide > 2 * tile.stages
        assert row["shared_bytes"] <= 99 << 10  # what consumer GPUs have
        assert bool(row["tensor_core"]) == (tile.kind == "matmul")


def test_a_cpu_engine_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from engine.runner.loading import choose_linears; from engine.models.linear_op import linear\n"
        "print(linear(torch.ones(2, 3), torch.ones(4, 3), None, 1).sum().item())"
    )
    assert run(["-c", code]).strip() == "24.0"


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", BUCKETS)
def test_every_layer_has_a_plan_that_covers_the_latency_of_memory(layer: str, rows: int) -> None:
    n, k = LAYERS[layer]
    resident = max(
        min(-(-n // p.tile.block_n) * p.splits, 2 * H200_MULTIPROCESSORS)
        * min(p.tile.bytes_in_flight, 2 * p.tile.block_n * k // p.splits)
        for p in plans_for(n, k, rows, H200_MULTIPROCESSORS)
    )
    assert resident >= min(H200_MULTIPROCESSORS * NEEDED_IN_FLIGHT, 2 * n * k)


def test_plans_that_cannot_be_right_are_not_proposed() -> None:
    assert plans_for(4096, 4104, 1, H200_MULTIPROCESSORS) == []  # rows that do not begin at 16 bytes
    for rows in BUCKETS:
        plans = plans_for(1024, 2048, rows, H200_MULTIPROCESSORS)
        assert len(plans) == len(set(plans)) > 0
        assert all((p.tile.kind == "matmul" or rows == 1) and rows <= p.tile.max_rows for p in plans)
    assert max(p.splits for p in plans_for(1024, 4096, 16, H200_MULTIPROCESSORS)) > 1
    assert {p.splits for p in plans_for(151936, 4096, 16, H200_MULTIPROCESSORS)} == {1}


def test_a_row_count_takes_the_next_larger_bucket() -> None:
    for rows in range(1, MAX_ROWS + 1):
        assert BUCKETS[bucket_of(rows)] == min(b for b in BUCKETS if b >= rows)


plans = st.none() | st.builds(Plan, st.sampled_from(TILES), st.sampled_from(SPLITS))


@given(st.tuples(*[plans] * len(BUCKETS)))
def test_a_choice_survives_being_an_integer(chosen: tuple[Plan | None, ...]) -> None:
    code = encode(dict(zip(BUCKETS, chosen)))
    assert 0 <= code < 2**63
    decoded = decode(code)
    assert decoded[0] is None and len(decoded) == MAX_ROWS + 1
    assert all(decoded[rows] == chosen[bucket_of(rows)] for rows in range(1, MAX_ROWS + 1))
    assert (code == 0) == all(plan is None for plan in chosen)
