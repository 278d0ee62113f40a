"""`pageloom::linear`: a linear layer that takes a kernel of ours for few rows, and the library's for many.

An operator, because the number of rows is known only when a step runs (or is captured), not when the model is traced:
the compiler sees one opaque call, inside a piece, and the same one in every layer. What it could do with a plain
`linear` it cannot do here, but on CUDA that is nothing: a matrix product is a call of the library's there too, and what
surrounds it is fused among itself. Registered without `custom_op`'s wrappers, which cost more than the launch: a call
costs the host 2 to 3 µs more than the library's alone, in steps that are not captured.

The choice is an argument, so that it needs no state: an integer made by `engine.models.kernels.encode`, or `FIXED`: a
row's bits do not depend on how many there are (`engine.models.product_kernels`).
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear as _library_linear

from engine.models import product_kernels
from engine.models.kernels import MAX_ROWS, decode, device_kernels
from engine.models.product_kernels import DENSE, Matrix

LINEAR_OP = "pageloom::linear"
FIXED = -1

_library = torch.library.Library("pageloom", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "linear(Tensor x, Tensor weight, Tensor? bias, int choice) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


def on_cuda(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: int) -> torch.Tensor:
    """The operator's implementation for CUDA tensors."""
    rows = x.shape[0]
    if choice == FIXED:
        return product_kernels.device_kernels().linear(x, Matrix(weight, None, DENSE), bias, fixed=True)
    if rows <= MAX_ROWS:
        plan = decode(choice)[rows]
        if plan is not None:
            return device_kernels().linear(x, weight, bias, plan)
    return _library_linear(x, weight, bias)


def on_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: int) -> torch.Tensor:
    """The operator's implementation for CPU tensors, which have no kernels of ours: any choice is the library."""
    return _library_linear(x, weight, bias)


def _shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


for _key, _function in (("CUDA", on_cuda), ("CPU", on_cpu)):
    _library.impl("linear", _function, _key)  # type: ignore[no-untyped-call]  # torch leaves it untyped
torch.library.register_fake(LINEAR_OP, _shape, lib=_library)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, choice: int) -> torch.Tensor:
    """x [rows, k], weight [n, k], bias [n] or None → [rows, n] in x's dtype; `choice`: `FIXED`, or from `encode`."""
    y: torch.Tensor = torch.ops.pageloom.linear(x, weight, bias, choice)
    return y
