"""`pageloom::expert_linear`: rows times the matrices of experts. One operator, because how many rows an expert gets is
known only when a step runs."""

from __future__ import annotations

import torch
from torch.nn import functional as F

EXPERT_LINEAR_OP = "pageloom::expert_linear"

_library = torch.library.Library("pageloom", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "expert_linear(Tensor x, Tensor ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)


def on_cpu(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The operator on CPU tensors: an expert's rows together."""
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids, minlength=weight.size(0)).tolist()
    out = x.new_empty(x.size(0), weight.size(2 if transposed else 1))
    first = 0
    for expert, count in enumerate(counts):
        if count:
            rows = order[first : first + count]
            matrix = weight[expert].T if transposed else weight[expert]
            out[rows] = F.linear(x[rows], matrix, None if bias is None else bias[expert])
            first += count
    return out


def on_cuda(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """The operator on CUDA tensors: the host never learns the counts, so that a graph can hold it."""
    order = torch.argsort(ids, stable=True)
    ends = torch.searchsorted(ids[order], torch.arange(weight.size(0), device=x.device), right=True, out_int32=True)
    product = torch._grouped_mm(x[order], weight if transposed else weight.transpose(1, 2), offs=ends)
    out = torch.empty_like(product)
    out[order] = product
    return out if bias is None else out + bias[ids]


def _shape(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    return x.new_empty(x.size(0), weight.size(2 if transposed else 1))


for _key, _function in (("CUDA", on_cuda), ("CPU", on_cpu)):
    _library.impl("expert_linear", _function, _key)  # type: ignore[no-untyped-call]  # torch leaves it untyped
torch.library.register_fake(EXPERT_LINEAR_OP, _shape, lib=_library)


def expert_linear(
    x: torch.Tensor, ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool = False
) -> torch.Tensor:
    """x [rows, k], ids [rows], weight [experts, n, k] (`transposed`: [experts, k, n]), bias [experts, n] → [rows, n]:
    each row times its expert's matrix."""
    product: torch.Tensor = torch.ops.pageloom.expert_linear(x, ids, weight, bias, transposed)
    return product
