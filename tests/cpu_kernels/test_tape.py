"""Tapes: what is called, with what, in which order; and what is refused, by a message that names it."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace

import pytest
import torch
from native_stages import NativeRows, PretendAttention
from tape_builder import (
    INPUT,
    LINEAR,
    NONE,
    RESULT,
    SCRATCH,
    STEP,
    Heads,
    TapeBuilder,
    Weights,
    linear,
    rotated,
    rows_at,
    run_tape,
    tape_ops,
)
from torch import Tensor

from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, pack_bf16

HIDDEN = 96
HEADS = Heads(3, 1, 16)
EPS = 1e-5


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


def rand(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).bfloat16()


def weights(n: int, k: int, seed: int = 0, norm: bool = False) -> Weights:
    packed = pack_bf16(rand(n, k, seed=seed, scale=k**-0.5))
    return Weights(packed, n, k, Format.BFLOAT16, None, rand(k, seed=seed) if norm else None, EPS if norm else 0.0)


QKV = weights(HEADS.columns, HIDDEN, 1, norm=True)
OUT = weights(HIDDEN, HEADS.q * HEADS.dim, 2)


def small_tape() -> TapeBuilder:
    """hidden and rope → a rotated layer; hidden plus a layer of its q."""
    t = TapeBuilder()
    hidden, rope = t.value(HIDDEN, INPUT), t.value(HEADS.dim, INPUT)
    heads, out = t.value(HEADS.columns, SCRATCH), t.value(HIDDEN, RESULT)
    t.matrix(QKV, (hidden, 0), (heads, 0))
    t.rotation(HEADS, (heads, 0), (rope, 0), (heads, 0))
    t.matrix(OUT, (heads, 0), (out, 0), (hidden, 0))
    return t


def inputs(rows: int) -> list[Tensor]:
    return [rand(rows, HIDDEN), rand(rows, HEADS.dim)]


def expected(ops: LinearOps, hidden: Tensor, rope: Tensor) -> Tensor:
    heads = rotated(ops, HEADS, linear(ops, QKV, hidden), rope)
    return linear(ops, OUT, heads[:, : HEADS.q * HEADS.dim], hidden)


def test_a_tape_runs_again_and_again_with_any_number_of_rows(ops: LinearOps) -> None:
    t = small_tape()
    tape = t.make(ops)
    assert tape.dtype == torch.uint8
    for rows in (3, 1, 200, 0, 3):
        hidden, rope = inputs(rows)
        (found,) = run_tape(ops, tape, [hidden, rope])
        assert torch.equal(found, expected(ops, hidden, rope))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rotation_without_a_rope_is_a_norm(ops: LinearOps, dtype: torch.dtype, adds: bool) -> None:
    t, norm = TapeBuilder(), rand(HIDDEN).to(dtype)
    hidden, made, out = t.value(HIDDEN, INPUT), t.value(HIDDEN, SCRATCH), t.value(HIDDEN, RESULT)
    t.matrix(weights(HIDDEN, HIDDEN), (hidden, 0), (made, 0))
    t.rotation(Heads(1, 0, HIDDEN, (norm, norm), EPS), (made, 0), NONE, (made, 0), (hidden, 0) if adds else NONE)
    t.matrix(weights(HIDDEN, HIDDEN), (made, 0), (out, 0), (hidden, 0))
    tape = t.make(ops)
    for rows in (1, 40):
        x = rand(rows, HIDDEN)
        made_rows = linear(ops, weights(HIDDEN, HIDDEN), x)
        normed = ops.rotate_heads(made_rows, None, norm, norm, EPS, 1, 0, HIDDEN, x if adds else None)
        assert torch.equal(run_tape(ops, tape, [x])[0], linear(ops, weights(HIDDEN, HIDDEN), normed, x))


def test_a_rotation_in_its_place_leaves_what_no_angle_turns(ops: LinearOps) -> None:
    t, heads = TapeBuilder(), replace(HEADS, rotary=6)
    hidden, rope, made = t.value(HIDDEN, INPUT), t.value(6, INPUT), t.value(HEADS.columns, RESULT)
    t.matrix(QKV, (hidden, 0), (made, 0))
    t.rotation(heads, (made, 0), (rope, 0), (made, 0))
    x, angles = rand(9, HIDDEN), rand(9, 6)
    assert torch.equal(run_tape(ops, t.make(ops), [x, angles])[0], rotated(ops, heads, linear(ops, QKV, x), angles))


def test_inputs_stay_as_they_were(ops: LinearOps) -> None:
    given = inputs(7)
    before = [x.clone() for x in given]
    t = small_tape()
    run_tape(ops, t.make(ops), given)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_attention_is_given_its_rows_where_they_are(ops: LinearOps) -> None:
    t = TapeBuilder()
    hidden = t.value(HIDDEN, INPUT)
    heads, attended, out = t.value(HEADS.columns, SCRATCH), t.value(48, SCRATCH), t.value(HIDDEN, RESULT)
    own = t.value(32, SCRATCH, size=4)
    layer, step, seen = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), []

    def attend(given_layer: int, given_step: int, r: NativeRows) -> None:
        assert (given_layer, given_step) == (layer.data_ptr(), step.data_ptr())
        q, k, v = (
            rows_at(*place, columns)
            for place, columns in (
                ((r.q, r.q_stride, r.rows), 48),
                ((r.k, r.k_stride, r.rows), 16),
                ((r.v, r.v_stride, r.rows), 16),
            )
        )
        seen.append(torch.cat((q, k, v), dim=1).clone())
        assert r.scratch % 64 == 0
        ctypes.memset(r.scratch, -1, r.rows * 128)
        rows_at(r.out, r.out_stride, r.rows, 48).copy_(-q)

    pretend = PretendAttention(attend)
    t.matrix(QKV, (hidden, 0), (heads, 0))
    t.attention(pretend.address, layer, (48, 16), [(heads, 0), (heads, 48), (heads, 64), (attended, 0)], 0, (own, 0))
    t.matrix(OUT, (attended, 0), (out, 0), (hidden, 0))
    tape = t.make(ops)
    for rows in (1, 5):
        x = rand(rows, HIDDEN)
        (found,) = run_tape(ops, tape, [x], step)
        qkv = linear(ops, QKV, x)
        assert torch.equal(seen[-1], qkv)
        assert torch.equal(found, linear(ops, OUT, -qkv[:, :48], x))
    assert len(seen) == 2


def test_every_attention_takes_the_step_of_its_layer_group(ops: LinearOps) -> None:
    taken: list[int] = []

    def attend(layer: int, step: int, rows: NativeRows) -> None:
        taken.append(step)

    pretend = PretendAttention(attend)
    t = TapeBuilder()
    x, out = t.value(64, INPUT), t.value(16, RESULT)
    for group in (1, 0, 2, 1):
        t.attention(pretend.address, STEP, (16, 16), [(x, 0), (x, 16), (x, 32), (out, 0)], group)
    tape, steps = t.make(ops), [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    run_tape(ops, tape, [rand(3, 64)], *steps)
    assert taken == [steps[group].data_ptr() for group in (1, 0, 2, 1)]
    with pytest.raises(RuntimeError, match="run_tape: 2 attention steps, not 3"):
        run_tape(ops, tape, [rand(3, 64)], *steps[:2])


def test_an_attentions_error_ends_the_run(ops: LinearOps) -> None:
    calls = itertools.count()

    def refuse(layer: int, step: int, rows: NativeRows) -> bytes | None:
        return b"attention: the third table is upside down" if next(calls) == 1 else None

    pretend = PretendAttention(refuse)
    t = TapeBuilder()
    x, out = t.value(64, INPUT), t.value(16, RESULT)
    for _ in range(4):
        t.attention(pretend.address, STEP, (16, 16), [(x, 0), (x, 16), (x, 32), (out, 0)])
    tape = t.make(ops)
    with pytest.raises(RuntimeError, match="run_tape: attention: the third table is upside down"):
        run_tape(ops, tape, [rand(3, 64)])
    assert next(calls) == 2, "nothing is called after it"
    run_tape(ops, tape, [rand(3, 64)])


def test_what_an_attention_raises_ends_the_run(ops: LinearOps) -> None:
    def fail(layer: int, step: int, rows: NativeRows) -> None:
        raise ValueError("no such table")

    pretend = PretendAttention(fail)
    t = TapeBuilder()
    x, out = t.value(64, INPUT), t.value(16, RESULT)
    t.attention(pretend.address, STEP, (16, 16), [(x, 0), (x, 16), (x, 32), (out, 0)])
    t.matrix(weights(16, 16), (out, 0), (out, 0))
    with pytest.raises(RuntimeError, match=r"run_tape: ValueError.*no such table"):
        run_tape(ops, t.make(ops), [rand(3, 64)])


def test_times_are_the_steps_borders(ops: LinearOps) -> None:
    t = TapeBuilder()
    x, out = t.value(HIDDEN, INPUT), t.value(HIDDEN, RESULT)
    for _ in range(3):
        t.matrix(weights(HIDDEN, HIDDEN), (x, 0), (out, 0), alone=True)
    tape, times = t.make(ops), torch.full((4,), -1)
    (found,) = run_tape(ops, tape, [rand(3, HIDDEN)], times=times)
    assert torch.equal(found, run_tape(ops, tape, [rand(3, HIDDEN)])[0])
    assert times[0] >= 0 and bool((times.diff() >= 0).all())
    for wrong in (torch.zeros(3, dtype=torch.int64), torch.zeros(4), torch.zeros(8, dtype=torch.int64)[::2]):
        with pytest.raises(RuntimeError, match=r"run_tape: times must be contiguous int64 \[4\]"):
            run_tape(ops, tape, [rand(3, HIDDEN)], times=wrong)


def test_a_program_that_ends_early_is_refused(ops: LinearOps) -> None:
    t = small_tape()
    for end in range(len(t.program)):
        with pytest.raises(RuntimeError, match="make_tape: the program ends early"):
            t.make(ops, t.program[:end])
    t.reals = t.reals[:-1]
    with pytest.raises(RuntimeError, match="make_tape: reals end early"):
        t.make(ops)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((0, 2, INPUT, 0), "value 1 is malformed"),
        ((-4, 2, INPUT, 0), "value 1 is malformed"),
        ((8, 2, 3, 0), "value 1 is malformed"),
        ((8, 2, -1, 0), "value 1 is malformed"),
        ((8, 3, SCRATCH, 0), "value 1 is malformed"),
        ((8, 4, INPUT, 1), "value 1 is malformed"),
        ((8, 4, RESULT, 0), "value 1 is malformed"),
        ((8, 2, SCRATCH, -64), "value 1 is malformed"),
        ((8, 2, SCRATCH, 32), "index 32 does not fit"),
        ((8, 2, INPUT, 2), "index 2 does not fit"),
        ((8, 2, RESULT, 1), "index 1 does not fit"),
    ],
    ids=str,
)
def test_a_value_without_a_place_is_refused(ops: LinearOps, value: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"make_tape: .*{message}"):
        tape_ops(ops).make_tape([], [2, 8, 2, INPUT, 0, *value, 0], [])


@pytest.mark.parametrize(
    ("x", "out", "residual", "message"),
    [
        ((7, 0), (1, 0), NONE, "columns 0 to 96 are not in value 7"),
        ((0, 1), (1, 0), NONE, "columns 1 to 97 are not in value 0"),
        ((0, -1), (1, 0), NONE, "columns -1 to 95 are not in value 0"),
        ((0, 0), (1, 2), NONE, "columns 2 to 98 are not in value 1"),
        ((0, 0), (1, 0), (2, 0), "columns 0 to 96 are not in value 2"),
        (NONE, (1, 0), NONE, "a value is missing"),
        ((0, 0), NONE, NONE, "a value is missing"),
    ],
    ids=str,
)
def test_a_reference_outside_its_value_is_refused(
    ops: LinearOps, x: tuple[int, int], out: tuple[int, int], residual: tuple[int, int], message: str
) -> None:
    t = TapeBuilder()
    t.value(96, INPUT), t.value(96, RESULT), t.value(95, INPUT)
    t.matrix(weights(96, 96), x, out, residual)
    with pytest.raises(RuntimeError, match=f"make_tape: {message}"):
        t.make(ops)


def test_attention_of_rows_that_are_not_there_is_refused(ops: LinearOps) -> None:
    pretend = PretendAttention(lambda layer, step, rows: None)
    for refs, message in (
        ([(0, 17), (0, 48), (0, 64), (1, 0)], "columns 17 to 65 are not in value 0"),
        ([(0, 0), (0, 48), (0, 49), (1, 0)], "columns 49 to 65 are not in value 0"),
        ([(0, 0), (0, 48), (0, 48), (1, 1)], "columns 1 to 49 are not in value 1"),
        ([(0, 0), NONE, (0, 48), (1, 0)], "a value is missing"),
    ):
        t = TapeBuilder()
        t.value(64, INPUT), t.value(48, RESULT)
        t.attention(pretend.address, STEP, (48, 16), refs)
        with pytest.raises(RuntimeError, match=f"make_tape: {message}"):
            t.make(ops)
    t = TapeBuilder()
    t.value(64, INPUT), t.value(48, RESULT)
    t.attention(0, STEP, (48, 16), [(0, 0), (0, 0), (0, 0), (1, 0)])
    with pytest.raises(RuntimeError, match="make_tape: an attention without its functions"):
        t.make(ops)


def matrix_program(
    tensor: int, bias: int = -1, norm: int = -1, n: int = 96, k: int = 96, format: int = 0, isa: int = 0
) -> list[int]:
    values = [2, 96, 2, INPUT, 0, 96, 2, RESULT, 0]
    return [*values, 1, 1, LINEAR, 0, 0, k, tensor, n, format, bias, norm, *NONE, 0, 0, 0, isa, 1, 0, 96]


def test_a_layer_of_wrong_or_missing_tensors_is_refused(ops: LinearOps) -> None:
    good = pack_bf16(rand(96, 96))
    tensors = [good, rand(95), rand(96).double(), good.view(torch.int8), good[:2], good.repeat(1, 2)]
    refused = [
        ("a tensor is missing", matrix_program(-1)),
        ("there is no tensor 6", matrix_program(6)),
        ("there is no tensor 9", matrix_program(0, bias=9)),
        (r"weight must be contiguous uint8 \[3 panels", matrix_program(1)),
        ("weight must be", matrix_program(3)),
        ("weight must be", matrix_program(4)),
        ("weight must be", matrix_program(0, n=97)),
        ("weight must be", matrix_program(0, n=-5)),
        ("do not hold k = 96", matrix_program(5)),
        ("do not hold k = 64", matrix_program(0, k=64)),
        ("do not hold k = 96 inputs in format 1", matrix_program(0, format=1)),
        ("unknown weight format", matrix_program(0, format=max(Format) + 1)),
        (r"bias must be contiguous bfloat16 \[96\]", matrix_program(0, bias=1)),
        ("norm_weight must be", matrix_program(0, norm=2)),
    ]
    make = tape_ops(ops).make_tape
    make(tensors, matrix_program(0), [0.0])
    for message, program in refused:
        with pytest.raises(RuntimeError, match=f"make_tape: .*{message}"):
            make(tensors, program, [0.0])
    with pytest.raises(RuntimeError, match="make_tape: ISA 99 is not available"):
        make(tensors, matrix_program(0, isa=99), [0.0])


def test_a_rotation_that_does_not_fit_is_refused(ops: LinearOps) -> None:
    for heads, message in (
        (Heads(3, 1, 15), "heads of 15 cannot be rotated in pairs"),
        (Heads(3, 1, 16, (rand(16), rand(8))), "k_norm must be"),
        (Heads(3, 1, 8, rotary=16), "16 elements of heads of 8 cannot be rotated in pairs"),
        (Heads(-1, 6, 16), r"-1 \+ 6 heads"),
    ):
        t = TapeBuilder()
        x, rope = t.value(heads.columns, INPUT), t.value(16, INPUT)
        t.rotation(heads, (x, 0), (rope, 0), (x, 0))
        with pytest.raises(RuntimeError, match=f"make_tape: .*{message}"):
            t.make(ops)


def test_wrong_inputs_of_a_run_are_refused(ops: LinearOps) -> None:
    t = small_tape()
    tape, (hidden, rope) = t.make(ops), inputs(3)
    refused: list[tuple[str, list[Tensor]]] = [
        ("0 inputs, not 2", []),
        ("1 inputs, not 2", [hidden]),
        ("3 inputs, not 2", [hidden, rope, rope]),
        (r"an input must be bfloat16 \[rows, 96\]", [hidden.float(), rope]),
        ("an input must be", [hidden.half(), rope]),
        ("an input must be", [hidden[:, :95], rope]),
        (r"an input must be bfloat16 \[rows, 16\]", [hidden, rope[:, :15]]),
        ("an input must be", [rope, hidden]),
        ("an input must be", [hidden[None], rope]),
        ("an input must be", [rand(96, 3).T, rope]),
        ("an input must be", [hidden, rope[0]]),
        ("inputs differ in their rows", [hidden, rope[:2]]),
        ("inputs differ in their rows", [hidden[:2], rope]),
    ]
    for message, given in refused:
        with pytest.raises(RuntimeError, match=f"run_tape: .*{message}"):
            run_tape(ops, tape, given)
    run_tape(ops, tape, [hidden, rope])


def test_what_is_no_tape_is_not_run(ops: LinearOps) -> None:
    t = small_tape()
    tape, given = t.make(ops), inputs(3)
    zeros = torch.zeros(4096, dtype=torch.uint8)
    for wrong in (tape[:-1], tape[:8], zeros, tape.view(torch.int8), torch.cat((tape, zeros)), tape[:0]):
        with pytest.raises(RuntimeError, match="run_tape: not a tape"):
            run_tape(ops, wrong, given)


@pytest.mark.parametrize(
    ("program", "reals", "message"),
    [
        ([2, 8, 2, 0, 0, 8, 2, 1, 0, 1, -2], [], "negative count"),
        ([-1, 0], [], "negative count"),
        ([1, 8, 2, 0, 0, -3], [], "negative count"),
        ([1, 8, 2, 0, 0, 1, 1, 7], [], "no call is of kind 7"),
        ([1, 8, 2, 0, 0, 1, 1, 5, 0, 0], [], "a sum without its group"),
        ([3, 8, 2, 0, 0, 8, 2, 1, 0, 8, 2, 1, 0, 0], [], "two values are result 0|does not fit its place"),
        ([1, 8, 2, 0, 0, 0, 7], [], "goes on behind its end"),
        ([1, 8, 2, 0, 0, 0], [1e-5], "goes on behind its end"),
    ],
)
def test_a_program_with_wrong_counts_is_refused(
    ops: LinearOps, program: list[int], reals: list[float], message: str
) -> None:
    library = getattr(torch.ops, ops.packed_linear.namespace)
    with pytest.raises(RuntimeError, match=f"make_tape: .*({message})"):
        library.make_tape([], program, reals)
