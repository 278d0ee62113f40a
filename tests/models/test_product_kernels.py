"""Products by matrices of any format, and experts: equal to float64 under the interpreter; grids made by the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.models.product_kernels import TILES, most_tiles, splits_for, tile_for

HERE = Path(__file__).parent
CASES = ("experts", "tiles", "rows", "unread", "elsewhere", "placing", "route", "ties", "formats", "halves")
CASES += ("quantised", "fixed", "serving", "fixed mixture")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[str]:
    """What one process printed of all cases."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(HERE / "interpret_products.py"), *CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    yield done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_kernels_under_the_interpreter(interpreted: str, case: str) -> None:
    assert f"{case} right\n" in interpreted, interpreted


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.sampled_from([16, 32, 64, 128]))
def test_however_rows_are_dealt_out_there_are_tiles_enough(counts: list[int], lines: int) -> None:
    needed = sum(-(-count // lines) for count in counts)
    assert needed <= most_tiles(sum(counts), len(counts), lines)


@given(st.integers(1, 100000), st.integers(1, 300), st.booleans())
def test_a_tile_is_no_larger_than_what_an_expert_has_on_average(rows: int, experts: int, quantised: bool) -> None:
    tile, smaller = tile_for(rows, experts, quantised), list(TILES[quantised])
    at = smaller.index(tile)
    assert at == 0 or rows > smaller[at - 1].block_m * experts


def test_splits_depend_on_the_shape_and_leave_whole_tiles() -> None:
    tile = TILES[True][0]
    assert splits_for(151936, 4096, tile) == 1 < splits_for(1024, 4096, tile) <= 8
    assert splits_for(1024, 256, tile) == 1


def test_a_cpu_engine_needs_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from engine.models.spec import ExpertsSpec, RouterSpec\n"
        "from engine.models.experts import Experts, Router\n"
        "spec = ExpertsSpec(count=3, inner_size=4, router=RouterSpec(top_k=2))\n"
        "cpu = torch.device('cpu')\n"
        "parts = Router(spec.router, 8, 3, torch.float32, cpu), Experts(spec, 8, torch.float32, cpu)\n"
        "for part in parts: [p.fill_(0.1) for p in part.parameters()]\n"
        "x = torch.ones(5, 8); print(tuple(parts[1](x, *parts[0](x)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.stdout.strip() == "(5, 8)", done.stderr


def test_the_operators_are_opaque_to_a_trace() -> None:
    """Shapes alone: no kernel runs when a model is traced, and nothing depends on how many tokens there are."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from engine.models.expert_op import mixture, route
    from engine.models.product_kernels import DENSE, Gate, Matrix

    with FakeTensorMode():
        logits = torch.empty(7, 5, device="cuda")
        ids, factors = route(logits, 0, 2, True, None, 1, 1, 1.0)
        assert (ids.shape, ids.dtype, factors.shape, factors.dtype) == ((7, 2), torch.int32, (7, 2), torch.float32)
        x = torch.empty(7, 16, device="cuda", dtype=torch.bfloat16)
        gate_up, down = (x.new_empty(shape) for shape in ((5, 24, 16), (5, 16, 12)))
        matrices = Matrix(gate_up, None, DENSE), Matrix(down, None, DENSE)
        y = mixture(x, ids, factors, *matrices, (None, None), x, Gate(1))
        assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "cuda")
