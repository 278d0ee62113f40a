"""Run by test_linear_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Prints one line per case that passed; raises on the first that fails. Two traps of the interpreter (3.6 and 3.7): it
cuts float32 to bfloat16 instead of rounding, so bfloat16 is allowed twice the error, and it multiplies the bits of
bfloat16 in `tl.dot`, which is mended here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from quick_interpreter import quicken
from triton.runtime import interpreter

from engine.models.kernels import SPLITS, TILES, Plan, Tile
from engine.models.kernels.device import TritonKernels, sum_splits_kernel

HALF_PLACE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
KERNELS = TritonKernels()


def mend_dot() -> None:
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def create_dot(self: object, a: object, b: object, *others: object) -> object:
        def wide(operand: object) -> object:
            bf16 = operand.dtype.scalar == tl.bfloat16
            return builder.cast_impl(self, operand, tl.float32) if bf16 else operand

        return dot(self, wide(a), wide(b), *others)

    builder.create_dot = create_dot


def operands(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((m, k), (n, k), (n,)))
    return x.to(dtype), weight.to(dtype), (8 * bias).to(dtype)


def check_against_float64(plan: Plan, m: int, n: int, k: int, dtype: torch.dtype, with_bias: bool) -> None:
    """Off by no more than one rounding, and what float32 sums lose."""
    x, weight, bias = operands(m, n, k, dtype, seed=m + n + k)
    y = KERNELS.linear(x, weight, bias if with_bias else None, plan)
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if with_bias:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert y.dtype == dtype and y.shape == (m, n)
    worst = ((y.double() - exact).abs() / (HALF_PLACE[dtype] * exact.abs() + 2e-6 * size)).max()
    assert worst <= 1.0, (plan, m, n, k, dtype, with_bias, float(worst))


def check_rows_do_not_see_each_other(plan: Plan, n: int, k: int) -> None:
    """Bit for bit what each row gives alone, whatever NaN the others hold."""
    x, weight, bias = operands(11, n, k, torch.bfloat16, seed=3)
    together = KERNELS.linear(x, weight, bias, plan)
    for row in (0, 4, 10):
        alone = KERNELS.linear(x[row : row + 1], weight, bias, plan)
        others = torch.full_like(x, float("nan"))
        others[row] = x[row]
        assert torch.equal(alone[0], together[row])
        assert torch.equal(KERNELS.linear(others, weight, bias, plan)[row], together[row])


def check_strided_and_unaligned_rows() -> None:
    for tile in (TILES[0], next(t for t in TILES if t.kind == "matmul")):
        m = min(3, tile.max_rows)
        x, weight, _ = operands(m, 20, 64, torch.bfloat16, seed=5)
        expected = KERNELS.linear(x, weight, None, Plan(tile))
        wide = torch.full((m, 130), float("nan"), dtype=x.dtype)
        wide[:, 1:129:2] = x
        assert torch.equal(KERNELS.linear(wide[:, 1:129:2], weight, None, Plan(tile)), expected)
        flat = torch.cat((torch.zeros(1, dtype=x.dtype), x.flatten()))
        assert torch.equal(KERNELS.linear(flat[1:].view(m, 64), weight, None, Plan(tile)), expected)


def check_splits_are_added_in_order() -> None:
    """Of values whose sum depends on the order; and nothing is written beyond the result."""
    generator = torch.Generator().manual_seed(7)
    for splits in SPLITS[1:]:
        m, n = 3, 211
        exponents = torch.randint(-12, 13, (splits, m, n), generator=generator)
        partials = torch.randn(splits, m, n, generator=generator) * 2.0**exponents
        bias = torch.randn(n, generator=generator)
        y = torch.full((m + 1, n), float("nan"))
        sum_splits_kernel[(-(-m * n // 128),)](partials, bias, y, m * n, n, splits, HAS_BIAS=1, BLOCK=128)
        total = torch.zeros(m, n)
        for partial in partials:
            total += partial
        assert torch.equal(y[:m], total + bias)
        assert y[m].isnan().all()


def shapes_for(tile: Tile) -> list[tuple[int, int]]:
    """(n, k): blocks that fit, blocks that do not, odd sizes, less than one block."""
    return [
        (2 * tile.block_n, 2 * tile.block_k),
        (2 * tile.block_n + 3, tile.block_k + 16),
        (tile.block_n - 1, 2 * tile.block_k + 1),
        (5, 33),
    ]


def main() -> None:
    quicken()
    mend_dot()
    tiles = [t for t in TILES if t.kind == sys.argv[1]]
    for index, tile in enumerate(tiles):
        for case, (n, k) in enumerate(shapes_for(tile)):
            dtype = (torch.bfloat16, torch.float16)[(index + case) % 2]
            rows = [1] if tile.kind == "matvec" else [1, 2 + (index + case) % 14, 16]
            for m in rows:
                splits = SPLITS[(index + case + m) % 4] if tile.kind == "matmul" else 1
                check_against_float64(Plan(tile, splits), m, n, k, dtype, with_bias=(case + m) % 2 == 0)
        print(f"{tile.name} equal", flush=True)
    if sys.argv[1] == "matmul":
        for splits in SPLITS:
            check_against_float64(Plan(tiles[1], splits), 5, 40, 700, torch.bfloat16, with_bias=True)
            check_rows_do_not_see_each_other(Plan(tiles[1], splits), 40, 700)
        check_splits_are_added_in_order()
        print("splits equal", flush=True)
    check_strided_and_unaligned_rows()
    print("views equal", flush=True)


if __name__ == "__main__":
    main()
