"""Linear layers whose outputs adapters change, and the operator that does it: an oracle in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._ops import OpOverload

from engine.adapters.config import BLOCK
from engine.errors import ConfigError
from engine.models.layers import LayerNorm, Linear, Norm, finished
from engine.models.packed import ActivatedLinear, JoinedLinear, PackedLinear
from engine.models.spec import Activation

NAME = "pageloom::add_adapters"


@torch.library.custom_op(NAME, mutates_args=("y",))
def add_adapters(
    y: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: Sequence[int],
) -> None:
    """Adds B (A x) of each row's adapter to y [rows, outputs], in place; x [rows, inputs].

    `step`: int32, see `StepAdapters`. a [slots, parts, max_rank, inputs]; b [slots, max_rank, outputs]; `ranks` int32
    [slots, parts], 0: the adapter leaves that part alone. `ends`: of the parts, among the outputs.
    """
    count, most = int(step[0]), step.numel() // 2 - 1
    if not count:
        return
    slots, order = step[1 : 1 + most], step[1 + most : 1 + most + count].long()
    order = order[order < len(y)]  # whoever tries a piece while a step runs meets that step's rows
    of_rows = slots[order]
    for slot in sorted(set(of_rows.tolist()) - {-1}):
        rows = order[of_rows == slot]
        given, start = x[rows].float(), 0
        made = y[rows].float()
        for part, end in enumerate(ends):
            if rank := int(ranks[slot, part]):
                low = given @ a[slot, part, :rank].float().T
                made[:, start:end] += low @ b[slot, :rank, start:end].float()
            start = end
        y[rows] = made.to(y.dtype)


@add_adapters.register_fake
def _(
    y: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: Sequence[int],
) -> None:
    return None


@torch.library.custom_op("pageloom::add_adapters_on_device", mutates_args=("y",))
def add_adapters_on_device(
    y: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: Sequence[int],
) -> None:
    """The same by Triton; of `step` only the slots of rows are read. Never waits for the device."""
    from engine.adapters.device import add_on_device

    add_on_device(y, x, step, a, b, ranks, ends)


@add_adapters_on_device.register_fake
def _(
    y: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: Sequence[int],
) -> None:
    return None


class Place(NamedTuple):
    """What there is to be room for."""

    ends: tuple[int, ...]
    """of the parts, among the outputs"""
    step: torch.Tensor
    """of the whole model"""
    slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")


class Room(NamedTuple):
    """Where the factors of one part of a layer are written."""

    a: torch.Tensor
    """[slots, parts, max_rank, inputs]"""
    b: torch.Tensor
    """[slots, max_rank, outputs]; if `op` writes them [slots, blocks, max_rank, BLOCK]"""
    ranks: torch.Tensor
    """int32 [slots, parts]"""
    part: int
    start: int
    """its first output"""
    op: OpOverload | None = None
    """`LinearOps.write_factors`"""


class Adapted(nn.Module):
    """Takes the place of a linear layer. Holds its factors: see `add_adapters`."""

    step: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor

    def __init__(self, linear: nn.Module, place: Place, b: tuple[int, ...] | None = None) -> None:
        super().__init__()
        outputs, inputs = shape_of(linear)
        parts, slots, max_rank = len(place.ends), place.slots, place.max_rank
        self.register_buffer("step", place.step)
        self.register_buffer("a", torch.zeros(slots, parts, max_rank, inputs, dtype=place.dtype, device=place.device))
        shape = (slots, *(b or (max_rank, outputs)))
        self.register_buffer("b", torch.zeros(shape, dtype=place.dtype, device=place.device))
        self.register_buffer("ranks", torch.zeros(slots, parts, dtype=torch.int32, device=place.device))

    def room(self, part: int, start: int) -> Room:
        """For factors whose outputs begin at `start`."""
        return Room(self.a, self.b, self.ranks, part, start)

    def clear(self, slot: int) -> None:
        """The slot's adapter changes nothing here, until something is written."""
        self.ranks[slot].zero_()

    @property
    def nbytes(self) -> int:
        """Of the factors of all slots."""
        return self.a.nbytes + self.b.nbytes


class AdaptedLinear(Adapted):
    """Computes the product, changes it, and finishes it itself."""

    def __init__(self, linear: nn.Module, place: Place) -> None:
        super().__init__(linear, place)
        self.ends, self.on_device = place.ends, place.device.type == "cuda"
        self.activation: Activation | None = None
        self.gated = False
        if isinstance(linear, ActivatedLinear | Linear):
            self.activation, self.gated = linear.activation, linear.gated
        if isinstance(linear, Linear):
            linear.activation, linear.gated = None, False
        self.linear = linear.linear if isinstance(linear, ActivatedLinear) else linear

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `engine.models.layers.Linear`."""
        if norm is not None:
            x = norm(x)
        y: torch.Tensor = self.linear(x)
        add = torch.ops.pageloom.add_adapters_on_device if self.on_device else torch.ops.pageloom.add_adapters
        add(y, x, self.step, self.a, self.b, self.ranks, self.ends)
        return finished(y, self.activation, self.gated, residual)


class AdaptedPacked(Adapted):
    """The same by one operator of the CPU kernels, which costs nothing where no row has an adapter. Its b is
    [slots, blocks, max_rank, BLOCK outputs]: what a thread reads lies together."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ends: torch.Tensor

    def __init__(self, linear: PackedLinear, place: Place) -> None:
        super().__init__(linear, place, (-(-linear.n // BLOCK), place.max_rank, BLOCK))
        ops = getattr(torch.ops, linear.op.namespace)
        self.op, self.write_op = ops.adapted_linear.default, ops.write_factors.default
        self.register_buffer("weight", linear.weight)
        self.register_buffer("bias", linear.bias)
        self.register_buffer("ends", torch.tensor(place.ends, dtype=torch.int32))
        self.n, self.format, self.gate = linear.n, linear.format, linear.gate

    def room(self, part: int, start: int) -> Room:
        """See `Adapted.room`."""
        return Room(self.a, self.b, self.ranks, part, start, self.write_op)

    def clear(self, slot: int) -> None:
        """See `Adapted.clear`."""
        self.ranks.numpy()[slot] = 0

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """See `engine.models.packed.PackedLinear`."""
        if isinstance(norm, LayerNorm):
            x, norm = norm(x), None
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        product = (x, self.weight, self.n, self.format, self.bias, weight, eps, residual, self.gate)
        y: torch.Tensor = self.op(*product, self.step, self.a, self.b, self.ranks, self.ends)
        return y


def adapted(linear: nn.Module, place: Place) -> Adapted:
    """Raises ConfigError."""
    base = linear.linear if isinstance(linear, ActivatedLinear) else linear
    if place.device.type == "cuda" and not isinstance(base, Linear):
        raise ConfigError("enable_lora: weights that stay packed on GPUs are not adapted yet; use device='cpu'")
    if type(linear) is PackedLinear and not linear.wide:
        return AdaptedPacked(linear, place)
    if isinstance(linear, PackedLinear) and linear.gate:
        raise ConfigError("enable_lora: MLPs whose columns are stored in another order (desc_act) are not adapted yet")
    return AdaptedLinear(linear, place)


def shape_of(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of its product."""
    if isinstance(linear, ActivatedLinear):
        return shape_of(linear.linear)
    if isinstance(linear, JoinedLinear):
        parts = [shape_of(part) for part in linear.parts]
        return sum(outputs for outputs, _ in parts), parts[0][1]
    if isinstance(linear, PackedLinear):
        return linear.n, linear.k
    assert isinstance(linear, Linear)
    outputs, inputs = linear.weight.shape
    return outputs, inputs
