"""Experts whose matrices adapters change. Rows of such adapters are left out of the product of all rows, and computed
expert by expert, each by the operators that change linear layers; the weighted sum is that of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from engine.adapters.config import BLOCK
from engine.adapters.linear import Place, Room
from engine.cpu_kernels.linear import separate_gate_up
from engine.errors import ConfigError
from engine.models.experts import Experts, gated
from engine.models.layers import activated
from engine.models.packed import FUSED_GATES
from engine.models.packed_experts import PackedExperts
from engine.models.spec import Activation, ClampedSwiGLU

_library = torch.library.Library("pageloom", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "leave_adapted(Tensor ids, Tensor step, Tensor changes, int nobody) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "add_adapted_experts(Tensor(a!) y, Tensor x, Tensor ids, Tensor weights, Tensor step, Tensor changes, "
    "Tensor[] matrices, Tensor? gate_up_bias, Tensor? down_bias, Tensor[] factors, Tensor first_ranks, "
    "Tensor second_ranks, str activation, float[] numbers, int[] packed, str namespace) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


def leave_adapted(ids: torch.Tensor, step: torch.Tensor, changes: torch.Tensor, nobody: int) -> torch.Tensor:
    """The operator: ids [tokens, top_k] as they are, but for rows whose adapter changes an expert here: `nobody`.
    `step`: see `StepAdapters`; `changes` bool [slots]."""
    found = ids.clone()
    changed = _changed(ids, step, changes)
    if changed is not None:
        found[changed[0]] = nobody
    return found


def add_adapted_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    step: torch.Tensor,
    changes: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    factors: Sequence[torch.Tensor],
    first_ranks: torch.Tensor,
    second_ranks: torch.Tensor,
    activation: str,
    numbers: Sequence[float],
    packed: Sequence[int],
    namespace: str,
) -> None:
    """The operator: adds to rows of y [tokens, hidden] that `leave_adapted` left out what their experts make of x.

    ids, `weights` [tokens, top_k], as `Router` returns them; `matrices` gate_up and down; `factors` first_a, first_b,
    second_a, second_b and ranks: see `AdaptedExperts`. `activation`: its name, of gated ones with "gated " before it;
    empty: of GPT-OSS, with `numbers`, its limit and alpha. `packed`: inner size, formats of both matrices and the gate,
    of matrices that are packed for the kernels in `namespace`; none: they are dense.
    """
    changed = _changed(ids, step, changes)
    if changed is None:
        return
    rows, slots = changed
    top_k, given = ids.size(1), x[rows]
    chosen, slots = ids[rows].flatten(), slots.repeat_interleave(top_k)
    made = x.new_empty(len(chosen), x.size(1))
    order, first = torch.argsort(chosen, stable=True), 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=len(first_ranks)).tolist()):
        if not count:
            continue
        pairs, first = order[first : first + count], first + count
        own = [each[expert] for each in factors]
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        ranks = (first_ranks[expert], second_ranks[expert])
        one = _Expert([each[expert] for each in matrices], biases, own, ranks, activation, numbers)
        table = _table(slots[pairs])
        tokens = given[pairs // top_k]
        made[pairs] = one.packed(tokens, table, packed, namespace) if packed else one.dense(tokens, table)
    positions = torch.arange(len(chosen), dtype=torch.int32).view(-1, top_k)
    if packed:
        combine = getattr(torch.ops, namespace).combine_experts
        y[rows] = combine(made, positions, weights[rows], y[rows], 0)
    else:
        y[rows] = Experts.combined(made, positions, weights[rows], y[rows])


def _like_ids(ids: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(ids)


def _nothing(*arguments: object) -> None:
    return None


for _function, _made in ((leave_adapted, _like_ids), (add_adapted_experts, _nothing)):
    _library.impl(_function.__name__, _function, "CPU")  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.library.register_fake(f"pageloom::{_function.__name__}", _made, lib=_library)


class _Expert:
    """One, of which rows of several adapters are computed."""

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        factors: Sequence[torch.Tensor],
        ranks: tuple[torch.Tensor, torch.Tensor],
        activation: str,
        numbers: Sequence[float],
    ) -> None:
        self._gate_up, self._down = matrices
        self._biases, self._ranks = biases, ranks
        self._first, self._second = factors[:2], factors[2:]
        self._activation, self._numbers = activation, numbers

    def packed(self, x: torch.Tensor, table: torch.Tensor, packed: Sequence[int], namespace: str) -> torch.Tensor:
        linear, hidden = getattr(torch.ops, namespace).adapted_linear, x.size(1)
        inner, gate_up_format, down_format, gate = packed
        ends = (torch.tensor([inner, 2 * inner], dtype=torch.int32), torch.tensor([hidden], dtype=torch.int32))
        biases, plain = self._biases, (None, 0.0, None)
        product = (x, self._gate_up, 2 * inner, gate_up_format, biases[0], *plain)
        if gate in FUSED_GATES.values():
            between = linear(*product, gate, table, *self._first, self._ranks[0], ends[0])
        else:
            both = separate_gate_up(getattr(torch.ops, namespace).packed_linear(*product, 0, False, 0))
            torch.ops.pageloom.add_adapters(both, x, table, *self._first, self._ranks[0], ends[0].tolist())
            between = self._activated(both)
        product = (between, self._down, hidden, down_format, biases[1], *plain)
        y: torch.Tensor = linear(*product, 0, table, *self._second, self._ranks[1], ends[1])
        return y

    def dense(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        add, parts = torch.ops.pageloom.add_adapters, self._ranks[0].size(1)
        size = len(self._gate_up) // parts
        inner = F.linear(x, self._gate_up, self._biases[0])
        add(inner, x, table, *self._first, self._ranks[0], [size * (part + 1) for part in range(parts)])
        between = self._activated(inner)
        y = F.linear(between, self._down, self._biases[1])
        add(y, between, table, *self._second, self._ranks[1], [len(self._down)])
        return y

    def _activated(self, inner: torch.Tensor) -> torch.Tensor:
        *is_gated, name = self._activation.split(" ")
        if not name:
            limit, alpha = self._numbers
            return gated(inner, ClampedSwiGLU(limit=limit, alpha=alpha))
        known: Activation = name  # type: ignore[assignment]  # whoever calls the operator has it from one
        return gated(inner, known) if is_gated else activated(inner, known)


def _changed(ids: torch.Tensor, step: torch.Tensor, changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows whose adapter changes an expert, and their slots; None: there are none."""
    table = step.numpy()  # whose small operations are ten times as fast
    count, most = int(table[0]), len(table) // 2 - 1
    if not count:
        return None
    order = table[1 + most : 1 + most + count]
    order = order[order < len(ids)]  # whoever tries a piece while a step runs meets that step's rows
    slots = table[1 : 1 + most][order]
    does = changes.numpy()[slots] & (slots >= 0)
    if not does.any():
        return None
    return torch.from_numpy(order[does]).long(), torch.from_numpy(slots[does]).long()


def _table(slots: torch.Tensor) -> torch.Tensor:
    """As `StepAdapters` has it, of rows that all have an adapter."""
    count = torch.tensor([len(slots)])
    return torch.cat([count, slots, torch.argsort(slots, stable=True), count]).to(torch.int32)


class AdaptedExperts(nn.Module):
    """Takes the place of a layer's experts, and holds their factors, by expert, so that one's lie together: first_a
    [experts, slots, parts, max_rank, hidden], second_a [experts, slots, 1, max_rank, inner]; first_b and second_b
    [experts, slots, max_rank, outputs], of packed matrices [experts, slots, blocks, max_rank, BLOCK], unless GPT-OSS'
    gate is behind it; ranks int32 [experts, slots, parts], and 1, 0: the adapter leaves that part of that expert alone.
    """

    step: torch.Tensor
    first_a: torch.Tensor
    first_b: torch.Tensor
    second_a: torch.Tensor
    second_b: torch.Tensor
    first_ranks: torch.Tensor
    second_ranks: torch.Tensor
    changes: torch.Tensor

    def __init__(self, experts: nn.Module, hidden: int, place: Place) -> None:
        """Raises `ConfigError`."""
        super().__init__()
        if not isinstance(experts, Experts | PackedExperts) or experts.places is not None:
            raise ConfigError("max_lora_expert_rank: experts are adapted on CPUs, where each rank has all of them")
        self.experts = experts
        count = len(experts.gate_up)
        if isinstance(experts, PackedExperts):
            inner, first, parts = experts.inner, 2 * experts.inner, 2
            blocks = experts.gate in FUSED_GATES.values(), True
            formats = [experts.gate_up_format, experts.down_format, experts.gate]
            self._packed, self._namespace = [inner, *formats], experts.op.namespace
            self._activation, self._numbers = "", [experts.limit, experts.alpha]
        else:
            first, inner, blocks = experts.gate_up.size(1), experts.down.size(2), (False, False)
            parts, self._packed, self._namespace = first // inner, [], ""
            self._activation, self._numbers = _named(experts)
        everyone = torch.arange(count, dtype=torch.int32)
        experts.places = torch.cat([everyone, torch.tensor([-1], dtype=torch.int32)])
        self.register_buffer("step", place.step)
        self.register_buffer("changes", torch.zeros(place.slots, dtype=torch.bool))
        self._write = getattr(torch.ops, self._namespace).write_factors.default if self._packed else None
        shapes = (("first", hidden, first, parts, blocks[0]), ("second", inner, hidden, 1, blocks[1]))
        for name, inputs, outputs, of, in_blocks in shapes:
            a = (count, place.slots, of, place.max_rank, inputs)
            self.register_buffer(f"{name}_a", torch.zeros(a, dtype=place.dtype))
            b = (-(-outputs // BLOCK), place.max_rank, BLOCK) if in_blocks else (place.max_rank, outputs)
            self.register_buffer(f"{name}_b", torch.zeros((count, place.slots, *b), dtype=place.dtype))
            self.register_buffer(f"{name}_ranks", torch.zeros((count, place.slots, of), dtype=torch.int32))

    def room(self, expert: int, is_first: bool, part: int, start: int) -> Room:
        """Of one of its matrices; see `Adapted.room`."""
        of = self.first_a, self.first_b, self.first_ranks
        if not is_first:
            of = self.second_a, self.second_b, self.second_ranks
        a, b, ranks = (each[expert] for each in of)
        return Room(a, b, ranks, part, start, self._write if b.dim() == 4 else None)

    def settle(self, slot: int) -> None:
        """All of its adapter is written."""
        self.changes[slot] = self.first_ranks[:, slot].any() | self.second_ranks[:, slot].any()

    def clear(self, slot: int) -> None:
        """See `Adapted.clear`."""
        self.first_ranks[:, slot] = 0
        self.second_ranks[:, slot] = 0
        self.changes[slot] = False

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.first_a, self.first_b, self.second_a, self.second_b))

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `engine.models.experts.Experts`."""
        base, nobody = self.experts, len(self.first_ranks)
        left = torch.ops.pageloom.leave_adapted(ids, self.step, self.changes, nobody)
        y: torch.Tensor = base(x, left, factors, residual)
        torch.ops.pageloom.add_adapted_experts(
            y,
            x,
            ids,
            factors,
            self.step,
            self.changes,
            [base.gate_up, base.down],
            base.gate_up_bias,
            base.down_bias,
            [self.first_a, self.first_b, self.second_a, self.second_b],
            self.first_ranks,
            self.second_ranks,
            self._activation,
            self._numbers,
            self._packed,
            self._namespace,
        )
        return y


def _named(experts: Experts) -> tuple[str, list[float]]:
    """The activation as the operator takes it."""
    activation = experts.activation
    if isinstance(activation, str):
        return f"gated {activation}" if experts.gated else activation, []
    return "", [activation.limit, activation.alpha]
