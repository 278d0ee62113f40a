"""Experts in PEFT's files, as it saves what changes parameters (`target_parameters`): one A and one B for all experts
of a layer, under the name of their module, the second pair behind one `base_layer` more. Here each expert's come apart.

A is [experts * rank, d1], an expert's rows together; B is [d2, rank * experts], an expert's columns `experts` apart;
the change of an expert is B A, or its transpose, by what PEFT took for inputs: its releases differ. Shapes tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from engine.adapters.targets import Stack, Targets, whole_name
from engine.models.json_file import shown
from engine.weights.arranged_source import rows_in_order


class _Found(NamedTuple):
    module: str
    a: torch.Tensor
    b: torch.Tensor
    is_first: bool
    turned: bool | None
    """None: inputs and outputs are as many, so shapes do not tell"""


def spread(stacked: Mapping[str, Mapping[str, torch.Tensor]], targets: Targets) -> dict[str, torch.Tensor]:
    """`stacked`: tensors A and B by the module that `Targets.find_stack` knows. Returns those of experts, named as
    files name them that hold each apart. Raises ValueError."""
    found: dict[str, list[_Found]] = {}
    for module, pair in stacked.items():
        stack = targets.find_stack(module)
        assert stack is not None
        one = _found(module, pair, stack)
        found.setdefault(whole_name(module), []).append(one)
    tensors: dict[str, torch.Tensor] = {}
    for module, pairs in found.items():
        stack = targets.find_stack(module)
        assert stack is not None
        if len({one.is_first for one in pairs}) < len(pairs):
            raise ValueError(f"{shown(module)} has tensors of one kind twice")
        known = next((one.turned for one in pairs if one.turned is not None), None)
        if known is None:
            raise ValueError(f"{shown(module)}: inputs and outputs are as many: it may mean two things")
        for one in pairs:
            tensors |= _apart(module, one, known if one.turned is None else one.turned, stack)
    return tensors


def _found(module: str, pair: Mapping[str, torch.Tensor], stack: Stack) -> _Found:
    if set(pair) != {"A", "B"} or any(each.dim() != 2 for each in pair.values()):
        raise ValueError(f"{shown(module)} must have a lora_A and a lora_B of two dimensions")
    a, b, count = pair["A"], pair["B"], len(stack.parts)
    if len(a) == 0 or len(a) % count or b.size(1) != len(a):
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"{shown(module)}: {shapes} are not of {count} experts")
    if not stack.spec.gated:
        raise ValueError(f"{shown(module)}: of experts without gates each must have tensors of its own")
    hidden, inner = stack.parts[0][-1].rows.count, stack.spec.inner_size
    for is_first, outputs, inputs in ((True, stack.spec.first_size, hidden), (False, hidden, inner)):
        turned = [other for other, sizes in ((False, (inputs, outputs)), (True, (outputs, inputs))) if _is(a, b, sizes)]
        if turned:
            return _Found(module, a, b, is_first, turned[0] if len(turned) == 1 else None)
    raise ValueError(f"{shown(module)}: {tuple(a.shape)} and {tuple(b.shape)} fit no matrix of these experts")


def _is(a: torch.Tensor, b: torch.Tensor, sizes: tuple[int, int]) -> bool:
    return (a.size(1), len(b)) == sizes


def _apart(module: str, one: _Found, turned: bool, stack: Stack) -> dict[str, torch.Tensor]:
    count = len(stack.parts)
    rank = len(one.a) // count
    by_expert = one.b.view(len(one.b), rank, count)
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(count):
        a, b = one.a[expert * rank :][:rank], by_expert[:, :, expert]
        if turned:
            a, b = b.T, a.T
        if one.is_first and stack.first is not None:
            b = rows_in_order(b, stack.first)
        inner = stack.spec.inner_size
        parts = {"gate_proj": b[:inner], "up_proj": b[inner:]} if one.is_first else {"down_proj": b}
        for name, own in parts.items():
            start = f"{module}.{expert}.{name}.lora_"
            tensors |= {f"{start}A.weight": a, f"{start}B.weight": own}
    return tensors
