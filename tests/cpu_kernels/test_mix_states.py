"""Layers that keep matrices as states: the native operator beside the torch modules, in steps of several sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attention_backends.native_build import ISAS
from engine.cpu_kernels.linear import LinearOps
from engine.kv_cache.block_pool import NO_BLOCK
from engine.layer_groups import State
from engine.models.convolution import Convolution
from engine.models.delta_net import DeltaNet
from engine.models.mamba import Mamba
from engine.models.mixers import ConvSpec, DeltaSpec, MambaSpec
from engine.runner.state_caches import StateCaches
from engine.step import NO_WRITES, Rows, ScheduledRow, Writes

SIZE, BLOCKS, WIDTHS = 4, 160, (1024, 192, 2048)
"""tokens of a block; blocks; bytes of a page in each cache"""
DELTAS = {
    "delta": DeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24, taps=4),
    "delta of whole columns": DeltaSpec(key_heads=1, value_heads=2, key_dim=12, value_dim=64, taps=2),
    "delta of many columns": DeltaSpec(key_heads=1, value_heads=1, key_dim=40, value_dim=70, taps=3),
    "kimi": DeltaSpec(key_heads=3, value_heads=3, key_dim=20, value_dim=20, taps=4, rank=8),
    "kimi of many keys": DeltaSpec(key_heads=1, value_heads=1, key_dim=72, value_dim=72, taps=4, rank=8),
    "kimi of whole columns": DeltaSpec(key_heads=2, value_heads=2, key_dim=32, value_dim=32, taps=4, rank=8),
}
MAMBAS = {
    "mamba": MambaSpec(heads=6, head_dim=20, groups=2, state_size=13, taps=4, amounts=(0.1, 0.6)),
    "mamba without bias and norm": MambaSpec(
        heads=2, head_dim=64, groups=1, state_size=8, taps=2, conv_bias=False, normed=False
    ),
}
SHORTS = {
    "short": ConvSpec(channels=96, taps=3),
    "short with biases": ConvSpec(channels=40, taps=5, bias=True),
}
STEPS = [  # of each row, tokens before and in the step
    [(0, 5), (0, 1), (0, 13)],
    [(5, 1), (1, 3), (13, 1), (0, 8)],
    [(6, 1), (4, 1), (14, 1), (8, 1)],
    [(7, 9), (5, 1), (15, 1), (9, 2)],
]


Layer = DeltaNet | Mamba | Convolution


def layer_of(case: str, dtype: torch.dtype) -> Layer:
    torch.manual_seed(3)
    made: Layer
    if case in DELTAS:
        made = DeltaNet(DELTAS[case], 1e-6, dtype, torch.device("cpu"))
    elif case in SHORTS:
        made = Convolution(SHORTS[case], SHORTS[case].bias, dtype, torch.device("cpu"))
    else:
        made = Mamba(MAMBAS[case], dtype, torch.device("cpu"))
    with torch.no_grad():
        for weights in made.parameters():
            weights.copy_(torch.randn(weights.shape) / 2)
    return made


class Device:
    """Caches, and a table in which every block of a row has a state, or every other one."""

    def __init__(self, layer: Layer, dtype: torch.dtype, every: int, most: int = 8) -> None:
        """`most`: blocks of a row."""
        pages = -(-2 * (layer.facts.state_bytes(dtype.itemsize) + 64) // sum(WIDTHS))
        self.states = StateCaches([layer, layer], dtype, State(pages, every))
        self.caches = [torch.zeros(pages * BLOCKS, width, dtype=torch.uint8) for width in WIDTHS]
        self.states.allocate(self.caches)
        order = torch.randperm(pages * BLOCKS, generator=torch.Generator().manual_seed(1)).view(BLOCKS, pages)
        self.states.place(order.tolist(), NO_WRITES, 0)
        self.firsts, self.every, self.most = order[:, 0].tolist(), every, most
        self.ends: dict[int, int] = {}
        """of each row: behind how many tokens its state is"""

    def table(self, row: int, upto: int) -> list[int]:
        blocks = -(-upto // SIZE)
        kept = [index == blocks - 1 or (index + 1) % self.every == 0 for index in range(self.most)]
        return [
            self.firsts[self.most * row + index] if its and index < blocks else NO_BLOCK
            for index, its in enumerate(kept)
        ]

    def step(self, rows: list[tuple[int, int]], x: torch.Tensor, outputs: int, drafts: int = 0) -> torch.Tensor:
        """`drafts`: how many of each row's tokens are."""
        tables = [self.table(row, before + count) for row, (before, count) in enumerate(rows)]
        for row, (before, count) in enumerate(rows):
            if before:  # what the step before has made last stays where it is, with drafts before those that were right
                for last in range((self.ends[row] - 1) // SIZE, (before + count - 1) // SIZE):
                    tables[row][last] = self.firsts[self.most * row + last]
            self.ends[row] = before + count - drafts
        batch = SimpleNamespace(block_size=SIZE, block_tables=torch.empty(0))
        self.states.place([], Writes.of((0, row, 0, table) for row, table in enumerate(tables)), 0)
        step = Rows.of(ScheduledRow(row, *each, 1 + drafts) for row, each in enumerate(rows))
        self.states.begin_step(cast(Any, batch), step)
        out = x.new_full((len(x), outputs), 7.0)
        self.states.mix(x, out, 1)
        return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*DELTAS, *MAMBAS, *SHORTS])
def test_outputs_and_states_are_those_of_the_torch_module(
    linear_ops: LinearOps, case: str, dtype: torch.dtype, isa: str
) -> None:
    if isa not in linear_ops.isas:
        pytest.skip(f"this CPU has no {isa}")
    torch_layer, native_layer = layer_of(case, dtype), layer_of(case, dtype)
    native_layer.compute_by(linear_ops, ISAS.index(isa) + 1)
    theirs, ours = Device(torch_layer, dtype, 2), Device(native_layer, dtype, 2)
    theirs.states.places = [None, None]
    generator, near = torch.Generator().manual_seed(5), 1e-4 if dtype == torch.float32 else 0.05
    for rows in STEPS:
        x = torch.randn(sum(count for _, count in rows) + 2, torch_layer.inputs, generator=generator).to(dtype)
        expected, got = theirs.step(rows, x, torch_layer.outputs), ours.step(rows, x, native_layer.outputs)
        torch.testing.assert_close(got, expected, rtol=near, atol=near)
        assert expected[:-2].abs().max() > 0.1 and not got[-2:].any()
    if dtype == torch.float32:
        expected, got = (torch.cat([each.flatten() for each in device.caches]) for device in (theirs, ours))
        torch.testing.assert_close(got.view(dtype), expected.view(dtype), rtol=near, atol=near)


@pytest.mark.parametrize("case", ["delta", "delta of whole columns", "kimi of whole columns", "mamba", "short"])
def test_a_sequences_bits_do_not_depend_on_how_it_is_cut_into_steps(linear_ops: LinearOps, case: str) -> None:
    layer = layer_of(case, torch.bfloat16)
    layer.compute_by(linear_ops)
    x = torch.randn(20, layer.inputs, generator=torch.Generator().manual_seed(9)).bfloat16()
    whole, cut = Device(layer, torch.bfloat16, 2), Device(layer, torch.bfloat16, 2)
    expected, at, parts = whole.step([(0, 20)], x, layer.outputs), 0, []
    for count in (3, 1, 9, 1, 6):
        parts.append(cut.step([(at, count)], x[at : at + count], layer.outputs))
        at += count
    assert torch.equal(torch.cat(parts), expected)


COUNTS = {
    "behind two tokens, and behind one": [16] * 7 + [14, 12] + [16] * 7 + [5, 9],
    "behind one, whose state is written there": [16] * 7 + [15, 15],
    "behind many": [16] * 7 + [6, 16, 16],
}
"""tokens of sequences: where the kernels' next 128 begin"""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("case", [*DELTAS, *MAMBAS, *SHORTS])
def test_a_sequences_bits_do_not_depend_on_the_others_of_a_step(
    linear_ops: LinearOps, case: str, counts: list[int], isa: str
) -> None:
    if isa not in linear_ops.isas:
        pytest.skip(f"this CPU has no {isa}")
    layer = layer_of(case, torch.bfloat16)
    layer.compute_by(linear_ops, ISAS.index(isa) + 1)
    x = torch.randn(2, sum(counts), layer.inputs, generator=torch.Generator().manual_seed(9)).bfloat16()
    together, *alone = [Device(layer, torch.bfloat16, 2) for _ in range(1 + len(counts))]
    for step in range(2):
        expected = together.step([(step * count, count) for count in counts], x[step], layer.outputs)
        for row, own in enumerate(x[step].split(counts)):
            found = alone[row].step([(step * len(own), len(own))], own, layer.outputs)
            assert torch.equal(found, expected[sum(counts[:row]) : sum(counts[: row + 1])]), (step, row)


@pytest.mark.parametrize("case", ["delta", "kimi of whole columns", "mamba", "short"])
def test_drafts_of_many_sequences(linear_ops: LinearOps, case: str) -> None:
    """A state is written behind the token before the drafts: of one sequence two tokens before the next 128 begin."""
    layer, rows = layer_of(case, torch.bfloat16), 20
    layer.compute_by(linear_ops)
    x = torch.randn(2, rows, 7, layer.inputs, generator=torch.Generator().manual_seed(9)).bfloat16()
    together, *alone = [Device(layer, torch.bfloat16, 2) for _ in range(1 + rows)]
    for step, before in enumerate((0, 3)):
        drafts = 4 if step == 0 else 0
        expected = together.step([(before, 7)] * rows, x[step].flatten(0, 1), layer.outputs, drafts).view(rows, 7, -1)
        for row in range(rows):
            found = alone[row].step([(before, 7)], x[step, row], layer.outputs, drafts)
            assert torch.equal(found, expected[row]), (step, row)


@pytest.mark.parametrize("case", ["delta", "kimi of whole columns", "mamba", "short"])
def test_a_prompt_of_many_tokens(linear_ops: LinearOps, case: str) -> None:
    layer = layer_of(case, torch.bfloat16)
    layer.compute_by(linear_ops)
    x = torch.randn(300, layer.inputs, generator=torch.Generator().manual_seed(9)).bfloat16()
    whole, cut = Device(layer, torch.bfloat16, 2, 75), Device(layer, torch.bfloat16, 2, 75)
    expected, at, parts = whole.step([(0, 300)], x, layer.outputs), 0, []
    for count in (127, 1, 172):
        parts.append(cut.step([(at, count)], x[at : at + count], layer.outputs))
        at += count
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("case", ["delta", "delta of whole columns", "mamba", "short"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_drafts_that_were_wrong_leave_nothing_and_right_ones_are_taken_in(
    linear_ops: LinearOps, case: str, native: bool
) -> None:
    dtype = torch.bfloat16 if native else torch.float32
    layer = layer_of(case, dtype)
    if native:
        layer.compute_by(linear_ops)
    right, wrong = torch.randn(2, 2 * 24, layer.inputs, generator=torch.Generator().manual_seed(9)).to(dtype)
    whole, drafted = Device(layer, dtype, 2), Device(layer, dtype, 2)
    expected, at = whole.step([(0, 24), (0, 24)], right, layer.outputs).view(2, 24, -1), 3
    drafted.step([(0, 3), (0, 3)], right.view(2, 24, -1)[:, :3].flatten(0, 1), layer.outputs)
    for drafts, accepted in ((3, 2), (4, 0), (2, 2), (5, 5), (0, 0), (1, 1), (1, 0), (0, 0)):
        given = wrong.view(2, 24, -1)[:, at : at + 1 + drafts].clone()
        given[:, : 1 + accepted] = right.view(2, 24, -1)[:, at : at + 1 + accepted]
        made = drafted.step([(at, 1 + drafts)] * 2, given.flatten(0, 1), layer.outputs, drafts).view(2, 1 + drafts, -1)
        found, theirs = made[:, : 1 + accepted], expected[:, at : at + 1 + accepted]
        assert torch.equal(found, theirs) if native else torch.allclose(found, theirs, rtol=1e-4, atol=1e-4)
        at += 1 + accepted
    assert at == 21


def test_what_does_not_fit_is_refused(linear_ops: LinearOps) -> None:
    layer = layer_of("delta", torch.float32)
    layer.compute_by(linear_ops)
    device = Device(layer, torch.float32, 2)
    x = torch.zeros(5, layer.inputs)
    with pytest.raises(RuntimeError, match=r"x must be \[5, \d+\]"):
        device.step([(0, 5)], x[:, 1:], layer.outputs)
    sequences, writes = torch.tensor([[0, 4, -1, 0]]), torch.zeros(0, 2, dtype=torch.int64)
    step = SimpleNamespace(sequences=sequences, writes=writes)
    states = cast(Any, SimpleNamespace(place=device.states.places[0], step=step))
    with pytest.raises(RuntimeError, match="sequences have 4 tokens of 5"):
        layer(x, x.new_zeros(5, layer.outputs), states)
    sequences[0, 1:3] = torch.tensor([5, 10**6])
    with pytest.raises(RuntimeError, match="reads block 1000000 of"):
        layer(x, x.new_zeros(5, layer.outputs), states)
