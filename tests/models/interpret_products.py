"""Run by test_product_kernels.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

`interpret_products.py CASE...` prints one line per case that passed; raises on the first that fails. For the
interpreter's two traps see interpret_linear_kernels.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "cpu_kernels"))

import torch
from interpret_linear_kernels import HALF_PLACE, mend_dot
from quick_interpreter import quicken
from random_blocks import BLOCK_FORMATS, blocks_of
from torch import Tensor

from engine.cpu_kernels.formats import Format, device_packable
from engine.cpu_kernels.quantize import pack_blocks, pack_float8, pack_int4, unpack
from engine.models.experts import chosen, gated
from engine.models.product_kernels import DENSE, TILES, Gate, Matrix, RoutingRules, Tile, most_tiles
from engine.models.product_kernels import device as launches
from engine.models.spec import Activation, ClampedSwiGLU, RouterSpec
from engine.weights import device_layouts
from engine.weights.source import EncodedRows

KERNELS = launches.TritonProducts()
placed = launches._placed
ACTIVATIONS: tuple[tuple[Gate, Activation | ClampedSwiGLU], ...] = (
    (Gate(1), "silu"),
    (Gate(2), "gelu_tanh"),
    (Gate(3, 0.5, 1.702), ClampedSwiGLU(0.5, 1.702)),
)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = normal(tokens, experts, seed=seed).topk(top_k, dim=1).indices.int()
    return ids, normal(tokens, top_k, seed=seed + 1).softmax(1)


def reference(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    matrices: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    activation: Activation | ClampedSwiGLU,
) -> Tensor:
    """float64 [tokens, hidden], rounded where separate operations would be, but in the end."""
    dtype, rows = x.dtype, []

    def rounded(values: Tensor) -> Tensor:
        return values.to(dtype).double()

    def product(values: Tensor, which: int, expert: int) -> Tensor:
        bias = biases[which]
        made = matrices[which][expert].double() @ values
        return rounded(made if bias is None else made + bias[expert].double())

    for token, experts in enumerate(ids.tolist()):
        total = torch.zeros(x.size(1), dtype=torch.float64)
        for place, expert in enumerate(experts):
            inner = rounded(gated(product(x[token].double(), 0, expert)[None], activation))[0]
            total += product(inner, 1, expert) * factors[token, place].double()
        rows.append(total)
    return torch.stack(rows)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within a few roundings of what is summed."""
    assert found.shape == expected.shape and bool(found.isfinite().all())
    error, size = (found.double() - expected).abs(), expected.abs() + expected.abs().mean()
    assert float((error / size).max()) <= 6 * HALF_PLACE.get(found.dtype, 1e-5), float((error / size).max())


def small_tiles() -> object:
    """Of few lines, since the interpreter's time goes with the grid and the tests' sizes are small."""
    return patch.dict(TILES, {q: tuple(replace(t, block_n=32, block_k=64) for t in TILES[q]) for q in TILES})


def check_experts() -> None:
    hidden, inner, count = 80, 48, 5
    case = 0
    for tokens, top_k in ((1, 2), (3, 5), (19, 3)):
        for gate, activation in ACTIVATIONS:
            dtype = (torch.bfloat16, torch.float16)[case % 2]
            biased = case % 3 != 0
            x = normal(tokens, hidden, seed=case, dtype=dtype)
            ids, factors = choices(tokens, count, top_k, seed=case)
            matrices = (
                normal(count, 2 * inner, hidden, seed=1, dtype=dtype) * hidden**-0.5,
                normal(count, hidden, inner, seed=2, dtype=dtype) * inner**-0.5,
            )
            biases = (
                normal(count, 2 * inner, seed=3, dtype=dtype) if biased else None,
                normal(count, hidden, seed=4, dtype=dtype) if biased else None,
            )
            residual = normal(tokens, hidden, seed=9, dtype=dtype) if case % 2 else None
            packed = tuple(Matrix(each, None, DENSE) for each in matrices)
            found = KERNELS.experts(x, ids, factors, packed, biases, residual, gate)
            expected = reference(x, ids, factors, matrices, biases, activation)
            assert_near(found, expected if residual is None else expected + residual.double())
            case += 1


def check_every_tile() -> None:
    """The largest, too, which take more rows than a test has: by hand."""
    count, n, k = 3, 40, 72
    weight = normal(count, n, k, seed=1, dtype=torch.bfloat16)
    ids = torch.arange(21, dtype=torch.int32) % 2  # nobody chose the last
    x = normal(21, k, seed=2, dtype=torch.bfloat16)
    expected = torch.einsum("rk,rnk->rn", x.double(), weight[ids.long()].double())
    for tile in TILES[False]:
        for matrix in (Matrix(weight, None, DENSE), Matrix(weight.transpose(1, 2).contiguous(), None, DENSE, True)):
            with patch.object(launches, "tile_for", lambda *sizes, tile=tile: tile):
                assert_near(KERNELS.expert_linear(x, ids, matrix, None), expected)
    for tokens in (1, 8):
        for matrix in (Matrix(weight, None, DENSE), Matrix(weight.transpose(1, 2).contiguous(), None, DENSE, True)):
            assert_near(KERNELS.expert_linear(x[:tokens], ids[:tokens], matrix, None), expected[:tokens])


def check_rows_do_not_see_each_other() -> None:
    """Bit for bit in any company, order and place of a tile, whatever NaN the others hold."""
    count, hidden, inner, tokens = 4, 64, 32, 30
    x = normal(tokens, hidden, seed=1, dtype=torch.bfloat16)
    ids, factors = choices(tokens, count, 2)
    packed = tuple(
        Matrix(normal(*shape, seed=3, dtype=torch.bfloat16), None, DENSE)
        for shape in ((count, 2 * inner, hidden), (count, hidden, inner))
    )

    def run(rows: Tensor, x: Tensor = x) -> Tensor:
        return KERNELS.experts(x[rows], ids[rows], factors[rows], packed, (None, None), None, Gate(1))

    with patch.object(launches, "tile_for", lambda *sizes: Tile(16, 32, 64, 4, 2)):
        together = run(torch.arange(tokens))
        for rows in (torch.arange(5, 14), torch.randperm(tokens, generator=torch.Generator().manual_seed(1))):
            assert torch.equal(run(rows), together[rows])
        spoiled = x.clone()
        spoiled[3] = float("nan")
        found = run(torch.arange(tokens), spoiled)
        others = torch.arange(tokens) != 3
        assert torch.equal(found[others], together[others]) and bool(found[3].isnan().all())
    few = run(torch.arange(8))
    assert torch.equal(few[3:5], run(torch.arange(3, 5)))


def check_unread_experts() -> None:
    """Those that nobody chose hold NaN."""
    count, hidden, inner = 6, 32, 32
    matrices = [normal(*shape, seed=1, dtype=torch.float16) for shape in ((6, 2 * inner, hidden), (6, hidden, inner))]
    ids, factors = choices(20, 3, 2)
    for tokens in (2, 20):
        x = normal(tokens, hidden, seed=2, dtype=torch.float16)
        results = []
        for value in (0.0, float("nan")):
            spoiled = [matrix.clone() for matrix in matrices]
            for matrix in spoiled:
                matrix[3:] = value
            packed = tuple(Matrix(each, None, DENSE) for each in spoiled)
            results.append(KERNELS.experts(x, ids[:tokens], factors[:tokens], packed, (None, None), None, Gate(1)))
        assert torch.equal(*results) and count == len(matrices[0])


def check_experts_elsewhere() -> None:
    """Choices of id -1 add nothing, not even where a token has no other; nor does the NaN of their factors."""
    count, hidden, inner = 5, 64, 32
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    dense = [normal(*shape, seed=1, dtype=torch.float16) * 0.1 for shape in shapes]
    biases = normal(count, 2 * inner, seed=3, dtype=torch.float16), normal(count, hidden, seed=4, dtype=torch.float16)
    packed = tuple(Matrix(each, None, DENSE) for each in dense)
    for tokens in (3, 8, 21):
        x, (ids, factors) = normal(tokens, hidden, seed=2, dtype=torch.float16), choices(tokens, count, 3)
        residual = normal(tokens, hidden, seed=9, dtype=torch.float16)
        is_own = ids % 2 == 0
        is_own[1] = False
        own, spoiled = torch.where(is_own, ids, -1), torch.where(is_own, factors, torch.nan)
        found = KERNELS.experts(x, own, spoiled, packed, biases, residual, Gate(1))
        expected = reference(x, ids, factors * is_own, (dense[0], dense[1]), biases, "silu")
        assert_near(found, expected + residual.double())
        assert torch.equal(found[1], residual[1])
        flat, rows = own.flatten(), x.repeat_interleave(3, 0)
        products = KERNELS.expert_linear(rows, flat, packed[0], biases[0])
        whole = torch.einsum("rk,rnk->rn", rows.double(), dense[0][ids.flatten().long()].double())
        whole += biases[0][ids.flatten().long()].double()
        assert_near(products, whole * is_own.flatten()[:, None])


def check_placing() -> None:
    """Each choice once, in tiles of its expert alone, in order; as many tiles as the host foresaw hold any."""
    for choices_count, experts, lines in ((1, 1, 16), (37, 5, 16), (2100, 7, 64), (40, 130, 16)):
        ids = torch.randint(experts, (choices_count,), generator=torch.Generator().manual_seed(experts)).int()
        if experts == 7:
            ids[ids == 3] = 4
            ids[ids == 5] = -1
        tile = Tile(lines, 32, 64, 4, 2)
        rows, of = placed(ids, experts, tile)
        assert len(of) == most_tiles(choices_count, experts, lines)
        expected: list[tuple[int, list[int]]] = []
        for expert in range(experts):
            mine = (ids == expert).nonzero().flatten().tolist()
            expected += [(expert, mine[at : at + lines]) for at in range(0, len(mine), lines)]
        for tile_index, (expert, mine) in enumerate(expected):
            assert int(of[tile_index]) == expert
            assert rows[tile_index * lines :][:lines].tolist() == mine + [choices_count] * (lines - len(mine))
        assert of[len(expected) :].tolist() == [-1] * (len(of) - len(expected))


def check_route() -> None:
    for index, (kind, experts, top_k, groups, top_groups, correction) in enumerate(
        (
            ("softmax", 8, 2, 1, 1, False),
            ("softmax", 60, 4, 1, 1, True),
            ("chosen_softmax", 32, 4, 1, 1, False),
            ("sigmoid", 24, 3, 1, 1, False),
            ("sigmoid", 40, 6, 8, 3, True),
            ("softmax", 24, 5, 3, 2, False),
            ("sigmoid", 16, 16, 1, 1, True),
        )
    ):
        for normalise in (True, False):
            spec = RouterSpec(
                kind=kind, top_k=top_k, normalise=normalise, groups=groups, top_groups=top_groups, scale=2.5
            )
            logits = 3 * normal(3, experts, seed=index)
            bias = normal(experts, seed=index + 50) if correction else None
            number = ("softmax", "chosen_softmax", "sigmoid").index(kind)
            rules = RoutingRules(number, top_k, normalise, groups, top_groups, 2.5)
            ids, factors = KERNELS.route(logits, bias, rules)
            expected = chosen(logits, spec, bias)
            assert torch.equal(ids, expected[0]), (ids, expected[0])
            torch.testing.assert_close(factors, expected[1], rtol=2e-6, atol=1e-7)


def check_route_ties_and_what_is_no_number() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [float("nan")] * 5, [1.0, float("nan"), 3.0, 2.0, 0.0]])
    for kind in (0, 1, 2):
        ids, factors = KERNELS.route(logits, None, RoutingRules(kind, 3, True, 1, 1, 1.0))
        assert ids[0].tolist() == [1, 2, 4]
        assert all(len(set(row)) == 3 and set(row) <= set(range(5)) for row in ids.tolist())
        assert factors[0].isfinite().all() and factors[1:].isnan().all()


def stored(format: Format, n: int, k: int, seed: int = 0) -> tuple[Matrix, Tensor]:
    """A matrix as GPUs have it, and float64 [n, k] that it stands for, by what unpacks a CPU's panels."""
    blocks = blocks_of(format, n, k).roll(seed, 0)
    return device_layouts.arranged(EncodedRows(format, blocks)), unpack(
        pack_blocks(blocks, format), n, k, format
    ).double()


def quantised(n: int, k: int) -> dict[str, tuple[Matrix, Tensor]]:
    found = {format.name: stored(format, n, k) for format in BLOCK_FORMATS if device_packable(n, k, format)}
    weight = normal(n, k, seed=8)
    four = device_layouts.int4(weight)
    found["int4"] = four, unpack(pack_int4(weight), n, k, Format.Q4_1).double()
    eight = device_layouts.int8(weight)
    assert eight.scales is not None
    assert (eight.levels * eight.scales - weight).abs().max() <= 0.5001 * eight.scales.max()
    found["int8"] = eight, eight.levels.double() * eight.scales.double()
    found["fp8"] = device_layouts.float8(weight), unpack(pack_float8(weight), n, k, Format.FLOAT8).double()
    return found


def check_formats() -> None:
    """In float32, where nothing is rounded before it is multiplied: exact levels and scales. Few rows and many."""
    n, k = 37, 512
    for index, (name, (matrix, values)) in enumerate(quantised(n, k).items()):
        bias = normal(n, seed=5) if index % 2 else None
        for rows in (1, 5, 18):
            x = normal(rows, k, seed=rows)
            expected = x.double() @ values.T + (0.0 if bias is None else bias.double())
            error = (KERNELS.linear(x, matrix, bias).double() - expected).abs().max() / expected.abs().max()
            assert error <= 2e-6, (name, rows, float(error))
        ids = torch.tensor([0, n - 1, 5, 0])
        assert torch.equal(KERNELS.lines(ids, matrix, k, torch.float32), values[ids].float()), name


def check_half_precision_of_formats() -> None:
    """Values are rounded to the dtype of rows and multiplied, in every tile."""
    matrix, values = stored(Format.Q4_K, 40, 512)
    x = normal(33, 512, seed=1, dtype=torch.bfloat16)
    expected = x.double() @ values.bfloat16().double().T
    for tile in TILES[True]:
        with patch.object(launches, "tile_for", lambda *sizes, tile=tile: tile):
            for rows in (2, 33):
                found = KERNELS.linear(x[:rows], matrix, None).double()
                assert float((found - expected[:rows]).abs().max() / expected.abs().max()) <= 2.0**-7


def check_quantised_experts() -> None:
    """Of two formats, as in GGUF files; in float32 against the same values dense."""
    count, hidden, inner = 4, 256, 32
    shapes = ((Format.Q4_K, 2 * inner, hidden), (Format.Q8_0, hidden, inner))
    made = [[stored(format, n, k, seed) for seed in range(count)] for format, n, k in shapes]
    packed, dense = [], []
    for matrices in made:
        levels, scales = (torch.stack([getattr(m, part) for m, _ in matrices]) for part in ("levels", "scales"))
        packed.append(Matrix(levels, scales, matrices[0][0].format))
        dense.append(torch.stack([values for _, values in matrices]).float())
    for tokens in (2, 11):
        x = normal(tokens, hidden, seed=tokens) * 0.1
        ids, factors = choices(tokens, count, 2)
        found = KERNELS.experts(x, ids, factors, (packed[0], packed[1]), (None, None), None, Gate(1))
        expected = reference(x, ids, factors, (dense[0], dense[1]), (None, None), "silu")
        assert float((found.double() - expected).abs().max() / expected.abs().max()) <= 1e-5


def check_fixed_sums() -> None:
    """A row's bits alone, among few (whose inputs programs share) and among many, by every format: some 5 rows of 150,
    in any order. Without it they differ."""
    k, n = 1408, 40
    packed = [matrix for name, (matrix, _) in quantised(n, 1536).items() if name in ("int8", "int4", "Q4_1", "Q6_K")]
    assert len(packed) == 4
    few_tile = patch.object(launches, "fixed_tile", lambda k, quantised, dtype: Tile(64, 32, 64, 4, 3))
    with few_tile:
        for matrix in (Matrix(normal(n, k, seed=3, dtype=torch.bfloat16), None, DENSE), *packed):
            inputs = k if matrix.format == DENSE else 1536
            assert launches.splits_for(n, inputs, launches.fixed_tile(k, False, torch.bfloat16)) == 2
            x = normal(150, inputs, seed=1, dtype=torch.bfloat16)
            bias = normal(n, seed=4, dtype=torch.bfloat16)
            many = KERNELS.linear(x, matrix, bias, fixed=True)
            assert_near(many, KERNELS.linear(x, matrix, bias).double())
            order = torch.randperm(150, generator=torch.Generator().manual_seed(1))
            for rows in (order[:1], order[:5], order[:64], order[:65], order):
                assert torch.equal(KERNELS.linear(x[rows], matrix, bias, fixed=True), many[rows])
    wide = normal(70, 1408, seed=1), Matrix(normal(n, 1408, seed=3), None, DENSE)
    with patch.object(launches, "fixed_tile", lambda k, quantised, dtype: Tile(64, 32, 32, 4, 3)):
        many = KERNELS.linear(*wide, None, fixed=True)
        for rows in (slice(1), slice(65), slice(64, 70)):  # NumPy's product of float32 depends on the place in a tile
            assert torch.equal(KERNELS.linear(wide[0][rows], wide[1], None, fixed=True), many[rows])


def check_the_tiles_that_serve() -> None:
    """Few rows against many."""
    odd = Matrix(normal(40, 1100, seed=3, dtype=torch.bfloat16), None, DENSE), 1100  # small tiles, uneven parts
    for matrix, k in (odd, (quantised(40, 1536)["Q4_1"][0], 1536)):
        x = normal(66, k, seed=1, dtype=torch.bfloat16)
        many = KERNELS.linear(x, matrix, None, fixed=True)
        assert torch.equal(KERNELS.linear(x[:3], matrix, None, fixed=True), many[:3])


def check_fixed_experts() -> None:
    count, hidden, inner, tokens = 4, 64, 32, 70
    x = normal(tokens, hidden, seed=1, dtype=torch.bfloat16)
    ids, factors = choices(tokens, count, 2)
    shapes = ((count, 2 * inner, hidden), (count, hidden, inner))
    packed = tuple(Matrix(normal(*shape, seed=3, dtype=torch.bfloat16), None, DENSE) for shape in shapes)

    def run(rows: Tensor) -> Tensor:
        part = x[rows], ids[rows], factors[rows]
        return KERNELS.experts(*part, packed, (None, None), None, Gate(1), fixed=True)

    with patch.object(launches, "fixed_tile", lambda k, quantised, dtype: Tile(64, 32, 64, 4, 3)):
        together = run(torch.arange(tokens))
        for rows in (torch.arange(3, 4), torch.arange(5, 14), torch.arange(tokens - 1, -1, -1)):
            assert torch.equal(run(rows), together[rows])


CASES: dict[str, Callable[[], None]] = {
    "fixed": check_fixed_sums,
    "serving": check_the_tiles_that_serve,
    "fixed mixture": check_fixed_experts,
    "experts": check_experts,
    "tiles": check_every_tile,
    "rows": check_rows_do_not_see_each_other,
    "unread": check_unread_experts,
    "elsewhere": check_experts_elsewhere,
    "placing": check_placing,
    "route": check_route,
    "formats": check_formats,
    "halves": check_half_precision_of_formats,
    "quantised": check_quantised_experts,
    "ties": check_route_ties_and_what_is_no_number,
}


def main() -> None:
    quicken()
    mend_dot()
    with small_tiles():
        for name in sys.argv[1:]:
            CASES[name]()
            print(f"{name} right", flush=True)


if __name__ == "__main__":
    main()
