"""Experts' MLPs over packed weights against float64 and against dense layers, on every ISA; rows never mix."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from dataclasses import replace

import pytest
import torch
from expert_oracle import CLAMPED, FORMATS, Case, choices, make_case, normal, one_by_one, reference, run
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_backends.native_build import ISAS
from engine.cpu_kernels.experts import ExpertWeights, pack_experts
from engine.cpu_kernels.formats import FORMAT_OF_GGUF, Format
from engine.cpu_kernels.linear import LinearOps
from engine.models.experts import Router
from engine.models.packed_experts import PackedExperts
from engine.models.spec import ClampedSwiGLU, RouterSpec

_by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
_by_isa = pytest.mark.parametrize("isa", ISAS)


def _number(ops: LinearOps, isa: str) -> int:
    if isa not in ops.isas:
        pytest.skip(f"this CPU has no {isa}")
    return ISAS.index(isa) + 1


def _rows(tokens: int, case: Case, seed: int = 7) -> Tensor:
    return normal(tokens, case.weights.hidden, seed=seed).bfloat16()


def _assert_near(found: Tensor, expected: Tensor, format: Format) -> None:
    """Within a rounding of bfloat16, and what roundings on the way move: a value at the middle of two goes to either,
    and a quantised one a level further."""
    lost = 2.0**-8 if format is Format.BFLOAT16 else 2.0**-6
    allowed = expected.abs() * 2.0**-8 + expected.abs().max() * lost
    assert bool(((found.double() - expected).abs() <= allowed).all())
    assert (found.double() - expected).abs().mean() < expected.abs().mean() * 4e-3


@_by_isa
@_by_format
@pytest.mark.parametrize("tokens", [1, 7, 60])
def test_result_is_the_weighted_sum_of_the_chosen_experts(
    linear_ops: LinearOps, format: Format, isa: str, tokens: int
) -> None:
    number = _number(linear_ops, isa)
    for biased, gate in ((False, 1), (True, 1), (True, 2)):
        case = make_case(format, biased=biased)
        x, (ids, weights) = _rows(tokens, case), choices(tokens, case.experts, 3)
        found = run(linear_ops, case, x, ids, weights, number, gate=gate)
        assert found.dtype == torch.bfloat16
        _assert_near(found, reference(case, x, ids, weights, gate=gate), format)


@_by_isa
@_by_format
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_products_have_the_bits_of_dense_layers_of_one_row(
    linear_ops: LinearOps, format: Format, isa: str, biased: bool
) -> None:
    """So nothing depends on a token's neighbours; but for the order of two roundings in a sum of float32."""
    number, case = _number(linear_ops, isa), make_case(format, biased=biased)
    x, (ids, weights) = _rows(40, case), choices(40, case.experts, 3)
    residual = _rows(40, case, seed=9)
    for top_k in (1, 3):
        some = ids[:, :top_k].contiguous(), weights[:, :top_k].contiguous()
        expected = one_by_one(linear_ops, case, x, *some, number, 1, residual)
        found = run(linear_ops, case, x, *some, number, residual=residual)
        assert (found == expected).float().mean() > 0.999
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-8)


@_by_isa
@_by_format
def test_a_row_has_the_same_bits_alone_and_in_any_batch(linear_ops: LinearOps, format: Format, isa: str) -> None:
    number, case = _number(linear_ops, isa), make_case(format)
    x, (ids, weights) = _rows(200, case), choices(200, case.experts, 3)
    together = run(linear_ops, case, x, ids, weights, number)
    alone = [run(linear_ops, case, x[t : t + 1], ids[t : t + 1], weights[t : t + 1], number) for t in range(12)]
    assert torch.equal(together[:12], torch.cat(alone))
    for part in (slice(0, 2), slice(3, 9), slice(11, 60), slice(50, 200)):
        assert torch.equal(run(linear_ops, case, x[part], ids[part], weights[part], number), together[part])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(linear_ops, case, x[order], ids[order], weights[order], number), together[order])


@_by_format
def test_any_number_of_threads_gives_the_same_bits(linear_ops: LinearOps, format: Format) -> None:
    case = make_case(format)
    for tokens in (1, 30, 300):
        x, (ids, weights) = _rows(tokens, case), choices(tokens, case.experts, 4)
        found = []
        for threads in (1, 2, 3, 9, 64):
            torch.set_num_threads(threads)
            found += [run(linear_ops, case, x, ids, weights) for _ in range(3)]
        assert all(torch.equal(found[0], other) for other in found)


def test_more_tokens_than_scratch_memory_is_meant_for(linear_ops: LinearOps) -> None:
    """They go through the stages in parts: same bits, and a bad id in the last part is found."""
    case = make_case(Format.BFLOAT16)
    x, (ids, weights) = _rows(6000, case), choices(6000, case.experts, 6)
    residual = _rows(6000, case, seed=9)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        together = run(linear_ops, case, x, ids, weights, residual=residual)
        for part in (slice(0, 50), slice(2700, 2760), slice(5990, 6000)):
            alone = run(linear_ops, case, x[part], ids[part], weights[part], residual=residual[part])
            assert torch.equal(together[part], alone)
        bad = ids.clone()
        bad[5999, 5] = case.experts
        with pytest.raises(RuntimeError, match="id 6 of token 5999 is outside"):
            run(linear_ops, case, x, bad, weights)


@_by_format
def test_all_tokens_to_one_expert(linear_ops: LinearOps, format: Format) -> None:
    case = make_case(format)
    for expert, threads in itertools.product((0, 3, case.experts - 1), (1, 2)):
        torch.set_num_threads(threads)
        x, ids = _rows(150, case), torch.full((150, 1), expert, dtype=torch.int32)
        weights = torch.ones(150, 1)
        _assert_near(run(linear_ops, case, x, ids, weights), reference(case, x, ids, weights), format)


def test_an_expert_that_is_chosen_twice_counts_twice(linear_ops: LinearOps) -> None:
    case = make_case(Format.BFLOAT16)
    x, ids = _rows(9, case), torch.full((9, 2), 2, dtype=torch.int32)
    once = run(linear_ops, case, x, ids[:, :1].contiguous(), torch.ones(9, 1))
    assert torch.equal(run(linear_ops, case, x, ids, torch.full((9, 2), 0.5)), once)


def test_no_tokens_give_an_empty_result(linear_ops: LinearOps) -> None:
    case = make_case(Format.INT8)
    empty = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    assert run(linear_ops, case, _rows(0, case), *empty).shape == (0, case.weights.hidden)


@_by_isa
def test_residual_is_added_to_the_rounded_sum(linear_ops: LinearOps, isa: str) -> None:
    number, case = _number(linear_ops, isa), make_case(Format.BFLOAT16)
    hidden = case.weights.hidden
    for tokens in (1, 50):
        wide = normal(tokens, hidden + 7, seed=5).bfloat16()
        x, residual = wide[:, 3 : hidden + 3], wide.flip(1)[:, 2 : hidden + 2]
        ids, weights = choices(tokens, case.experts, 2)
        plain = run(linear_ops, case, x, ids, weights, number)
        assert torch.equal(plain, run(linear_ops, case, x.contiguous(), ids, weights, number))
        assert torch.equal(run(linear_ops, case, x, ids, weights, number, residual=residual), residual + plain)


@_by_isa
@pytest.mark.parametrize("clamp", [CLAMPED, ClampedSwiGLU(limit=0.5, alpha=0.7)], ids=str)
def test_clamped_swiglu(linear_ops: LinearOps, isa: str, clamp: ClampedSwiGLU) -> None:
    number = _number(linear_ops, isa)
    for format, scale in itertools.product((Format.BFLOAT16, Format.INT8, Format.Q8_0), (1, 8)):
        case = make_case(format, biased=True)
        x, (ids, weights) = _rows(30, case) * scale, choices(30, case.experts, 3)
        found = run(linear_ops, case, x, ids, weights, number, gate=3, clamp=clamp)
        _assert_near(found, reference(case, x, ids, weights, gate=3, clamp=clamp), format)


@_by_isa
def test_extreme_gates_of_the_clamped_swiglu(linear_ops: LinearOps, isa: str) -> None:
    """One input for gates, one for ups, and a down matrix that passes the first sixteen values on."""
    number = _number(linear_ops, isa)
    gate_up, down = torch.zeros(1, 32, 16), torch.zeros(1, 16, 16)
    gate_up[0, :16, 0], gate_up[0, 16:, 1] = 1, 1
    down[0] = torch.eye(16)
    case = Case(pack_experts(gate_up, down, Format.BFLOAT16), gate_up, down, None, None)
    values = [-3e38, -200.0, -88.0, -7.0, -1e-3, -0.0, 0.0, 1e-3, 6.96875, 7.0, 7.03125, 88.0, 3e38]
    pairs = torch.tensor(list(itertools.product(values, values)))
    x = torch.zeros(len(pairs), 16)
    x[:, :2] = pairs
    x = x.bfloat16()
    ids, weights = torch.zeros(len(pairs), 1, dtype=torch.int32), torch.ones(len(pairs), 1)
    found = run(linear_ops, case, x, ids, weights, number, gate=3, clamp=CLAMPED)[:, 0]
    gate, up = x[:, 0].double().clamp(max=7.0), x[:, 1].double().clamp(-7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(found.double(), expected, rtol=3 * 2.0**-8, atol=1e-35)


@_by_isa
@_by_format
def test_nan_and_infinity_stay_in_their_row(linear_ops: LinearOps, format: Format, isa: str) -> None:
    number, case = _number(linear_ops, isa), make_case(format)
    x, (ids, weights) = _rows(40, case), choices(40, case.experts, 3)
    clean = run(linear_ops, case, x, ids, weights, number)
    others = torch.arange(40) != 1
    for value in (float("nan"), float("inf")):
        spoiled = x.clone()
        spoiled[1, 5] = value
        found = run(linear_ops, case, spoiled, ids, weights, number)
        assert torch.equal(found[others], clean[others])
        assert bool(found[1].isnan().all())


@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31)])
def test_ids_outside_are_refused(linear_ops: LinearOps, bad: int) -> None:
    case = make_case(Format.BFLOAT16)
    for tokens, threads in ((1, 1), (5, 1), (300, 2)):
        torch.set_num_threads(threads)
        x, (ids, weights) = _rows(tokens, case), choices(tokens, case.experts, 3)
        for token, place in ((0, 0), (tokens - 1, 2)):
            changed = ids.clone()
            changed[token, place] = bad
            with pytest.raises(RuntimeError, match=f"id {bad} of token {token} is outside"):
                run(linear_ops, case, x, changed, weights)
        run(linear_ops, case, x, ids, weights)


@_by_isa
@_by_format
def test_experts_that_are_elsewhere_bring_nothing(linear_ops: LinearOps, format: Format, isa: str) -> None:
    number, case = _number(linear_ops, isa), make_case(format, biased=True)
    x, (ids, weights) = _rows(60, case), choices(60, case.experts, 3)
    residual = _rows(60, case, seed=9)
    for own in ((0, 2, 5), (1,), (3, 4)):
        is_own = torch.isin(ids, torch.tensor(own))
        found = run(linear_ops, case, x, ids, weights, number, own=own)
        _assert_near(found, reference(case, x, ids, weights * is_own), format)
        first, factors = ids[:, :1].contiguous(), weights[:, :1].contiguous()
        of_one = run(linear_ops, case, x, first, factors, number, own=own, residual=residual)
        whole = run(linear_ops, case, x, first, factors, number, residual=residual)
        assert torch.equal(of_one, torch.where(is_own[:, :1], whole, residual)), "to the bit"


@settings(max_examples=30)
@given(st.data())
def test_parts_of_the_experts_add_up_whoever_has_which(linear_ops: LinearOps, data: st.DataObject) -> None:
    case = make_case(data.draw(st.sampled_from((Format.BFLOAT16, Format.INT8))), biased=True)
    placed = data.draw(st.lists(st.integers(0, 3), min_size=case.experts, max_size=case.experts))
    tokens, top_k = data.draw(st.sampled_from((0, 1, 5, 70, 3000))), data.draw(st.integers(1, 6))
    x, (ids, weights) = _rows(tokens, case), choices(tokens, case.experts, top_k, data.draw(st.integers(0, 99)))
    torch.set_num_threads(data.draw(st.sampled_from((1, 2, 5))))
    total = torch.zeros(x.shape, dtype=torch.float64)
    for rank in set(placed):
        own = [expert for expert, of in enumerate(placed) if of == rank]
        part = run(linear_ops, case, x, ids, weights, own=own)
        without = ~torch.isin(ids, torch.tensor(own)).any(1)
        assert bool((part[without] == 0).all())
        total += part.double()
    whole = run(linear_ops, case, x, ids, weights).double()
    torch.testing.assert_close(total, whole, rtol=2.0**-7, atol=2.0**-6)


def test_ids_beyond_what_is_known_are_refused_and_factors_of_others_are_not_read(linear_ops: LinearOps) -> None:
    case = make_case(Format.BFLOAT16)
    x, (ids, weights) = _rows(9, case), choices(9, case.experts, 2)
    for bad in (-1, case.experts):
        changed = ids.clone()
        changed[4, 1] = bad
        with pytest.raises(RuntimeError, match=f"id {bad} of token 4 is outside"):
            run(linear_ops, case, x, changed, weights, own=(2,))
    found = run(linear_ops, case, x, ids, torch.where(ids == 2, weights, torch.nan), own=(2,))
    assert torch.equal(found, run(linear_ops, case, x, ids, weights, own=(2,)))


def test_what_does_not_fit_is_refused(linear_ops: LinearOps) -> None:
    case = make_case(Format.BFLOAT16, biased=True)
    w, x, (ids, weights) = case.weights, _rows(3, case), choices(3, case.experts, 2)
    given = {
        "x": x, "ids": ids, "weights": weights, "gate_up": w.gate_up, "down": w.down, "inner": w.inner,
        "gate_up_format": 0, "down_format": 0, "gate_up_bias": w.gate_up_bias, "down_bias": w.down_bias,
        "places": None, "residual": x, "gate": 3, "limit": 7.0, "alpha": 1.702, "isa": 0,
    }  # fmt: skip
    linear_ops.packed_experts(*given.values())
    unaligned = torch.zeros(w.down.numel() + 2, dtype=torch.uint8)[2:].view(w.down.shape)
    refused: list[tuple[str, dict[str, object]]] = [
        ("x must be", {"x": x.float()}),
        ("x must have two dimensions", {"x": x[0]}),
        ("do not hold k = 100", {"x": x[:, :100]}),
        ("ids must be", {"ids": ids.long()}),
        ("ids must be", {"ids": ids[:2]}),
        ("ids must be", {"ids": ids.T.contiguous().T}),
        ("must hold a choice", {"ids": ids[:, :0].contiguous(), "weights": weights[:, :0].contiguous()}),
        ("weights must be", {"weights": weights.double()}),
        ("weights must be", {"weights": weights[:, :1].contiguous()}),
        ("gate_up must be", {"gate_up": w.gate_up[0]}),
        ("gate_up must be", {"gate_up": w.gate_up[:, :2].contiguous()}),
        ("gate_up must be", {"gate_up": w.gate_up[:0]}),
        ("down must be", {"down": w.down[:5]}),
        ("down must be", {"down": w.down[:, :, ::2]}),
        ("multiples of 64", {"down": unaligned}),
        ("multiple of 16", {"inner": 40}),
        ("multiple of 16", {"inner": 0}),
        ("gate_up must be", {"inner": 64}),
        ("unknown weight format", {"gate_up_format": max(Format) + 1}),
        ("do not hold", {"down_format": int(Format.INT8)}),
        ("bias of gate_up must be", {"gate_up_bias": w.down_bias}),
        ("bias of down must be", {"down_bias": w.down_bias.float()}),
        ("places must be", {"places": torch.arange(6)}),
        ("place 6 of expert 1 is outside", {"places": torch.tensor([0, 6, 2], dtype=torch.int32)}),
        ("place -2 of expert 2 is outside", {"places": torch.tensor([0, -1, -2], dtype=torch.int32)}),
        ("is outside \\[0, 1\\)", {"places": torch.zeros(1, dtype=torch.int32)}),
        ("residual must be", {"residual": x[:, :5]}),
        ("residual has 2 rows, x 3", {"residual": x[:2]}),
        ("unknown gate 0", {"gate": 0}),
        ("unknown gate 4", {"gate": 4}),
        ("limit above 0", {"limit": 0.0}),
        ("limit above 0", {"limit": float("nan")}),
        ("limit above 0", {"alpha": float("inf")}),
        ("not available", {"isa": 99}),
    ]  # fmt: skip
    for message, changes in refused:
        with pytest.raises(RuntimeError, match=message):
            linear_ops.packed_experts(*(given | changes).values())


def _unreadable_but_for(stack: Tensor, kept: set[int]) -> Tensor:
    """A copy in pages of which those of all other experts may not be read: to do so would end the process."""
    memory = mmap.mmap(-1, stack.numel())
    copy = torch.frombuffer(memory, dtype=torch.uint8).view(stack.shape)
    copy.copy_(stack)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    size = stack[0].numel()
    assert size % mmap.PAGESIZE == 0
    for expert in set(range(len(stack))) - kept:
        assert protect(ctypes.c_void_p(copy.data_ptr() + expert * size), ctypes.c_size_t(size), 0) == 0
    return copy


def test_experts_that_nobody_chose_are_not_read(linear_ops: LinearOps) -> None:
    whole = pack_experts(normal(5, 128, 64), normal(5, 64, 64), Format.BFLOAT16)
    kept = {1, 2, 4}
    parts = replace(whole, **{name: _unreadable_but_for(getattr(whole, name), kept) for name in ("gate_up", "down")})
    for tokens, threads in itertools.product((1, 2, 40), (1, 2)):
        torch.set_num_threads(threads)
        x = normal(tokens, 64).bfloat16()
        ids = torch.tensor(sorted(kept), dtype=torch.int32)[torch.arange(2 * tokens) % 3].view(tokens, 2)
        weights = torch.full((tokens, 2), 0.5)
        results = [
            run(linear_ops, Case(each, whole.gate_up, whole.down, None, None), x, ids, weights, number)
            for each in (whole, parts)
            for number in (ISAS.index(isa) + 1 for isa in linear_ops.isas)
        ]
        assert all(torch.equal(*pair) for pair in zip(results, results[len(results) // 2 :]))


def test_packing_refuses_what_it_cannot_hold() -> None:
    gate_up, down = torch.zeros(2, 64, 64), torch.zeros(2, 64, 32)
    refused = [
        ("do not go with their down", lambda: pack_experts(gate_up, down[:1], Format.BFLOAT16)),
        ("do not go with their down", lambda: pack_experts(gate_up[0], down, Format.BFLOAT16)),
        ("made of blocks", lambda: pack_experts(gate_up, down, Format.Q4_K)),
        ("multiple of 32", lambda: pack_experts(gate_up[:, :40], down[:, :, :20], Format.BFLOAT16)),
        (r"is \[2, 64\]", lambda: pack_experts(gate_up, down, Format.BFLOAT16, down_bias=torch.zeros(64))),
    ]
    for message, pack in refused:
        with pytest.raises(ValueError, match=message):
            pack()


def test_modules_compile_and_return_what_the_operators_do(linear_ops: LinearOps) -> None:
    case = make_case(Format.INT8)
    spec = RouterSpec(kind="sigmoid", top_k=3, correction=True, groups=3, top_groups=2, scale=2.5)
    router = Router(spec, 8, 6, torch.bfloat16, torch.device("cpu"))
    assert router.correction is not None
    router.correction.zero_()
    router.use(linear_ops.route)
    silu, clamped = (PackedExperts(linear_ops, case.weights, gate) for gate in ("silu", CLAMPED))

    def forward(x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = router.choose(logits)
        return clamped(silu(x, ids, weights), ids, weights, x)

    x, logits = _rows(5, case), normal(5, 6)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x, logits), forward(x, logits))
    ids, weights = linear_ops.route(logits, 2, 3, True, torch.zeros(6), 3, 2, 2.5)
    inner = run(linear_ops, case, x, ids, weights)
    expected = run(linear_ops, case, inner, ids, weights, residual=x, gate=3, clamp=CLAMPED)
    assert torch.equal(forward(x, logits), expected)


def test_formats_of_the_two_matrices_may_differ(linear_ops: LinearOps) -> None:
    """As in GGUF files, where down often has more bits."""
    first, second = (make_case(format) for format in (FORMAT_OF_GGUF[12], FORMAT_OF_GGUF[14]))
    weights = ExpertWeights(first.weights.gate_up, second.weights.down, Format.Q4_K, Format.Q6_K, 256, 256)
    case = Case(weights, first.gate_up, second.down, None, None)
    x, (ids, factors) = _rows(20, case), choices(20, case.experts, 2)
    _assert_near(run(linear_ops, case, x, ids, factors), reference(case, x, ids, factors), Format.Q4_K)
