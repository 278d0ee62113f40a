"""Linear layers, embeddings and experts whose quantised weights stay packed on a GPU, and the operators that use
them (`engine.models.product_kernels`). What is around a product (norm, activation, residual) is left to the compiler.

A checkpoint's loader puts them where the decoder had dense ones. Weights are plain buffers, inputs of a compiled piece
like any other, so equal layers share one artifact.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.models.expert_op import mixture
from engine.models.layers import Norm, finished
from engine.models.product_kernels import Gate, Matrix, device_kernels
from engine.models.spec import Activation

_library = torch.library.Library("pageloom", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch leaves it untyped
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "stored_linear(Tensor x, Tensor levels, Tensor? scales, Tensor? bias, int format, bool fixed) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_library.define(  # type: ignore[no-untyped-call]  # torch leaves it untyped
    "stored_lines(Tensor ids, Tensor levels, Tensor? scales, int format, int k, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def linear_on_cuda(
    x: torch.Tensor,
    levels: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    format: int,
    fixed: bool,
) -> torch.Tensor:
    """The operator on CUDA tensors."""
    return device_kernels().linear(x, Matrix(levels, scales, format), bias, fixed)


def lines_on_cuda(
    ids: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor | None, format: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    """The operator on CUDA tensors."""
    return device_kernels().lines(ids, Matrix(levels, scales, format), k, dtype)


def _product(x: torch.Tensor, levels: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty((x.shape[0], levels.shape[0]))


def _lines(
    ids: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor | None, format: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    return ids.new_empty((ids.shape[0], k), dtype=dtype)


ON_DEVICE = {"stored_linear": linear_on_cuda, "stored_lines": lines_on_cuda}
"""operators of this module, and what computes them on CUDA tensors"""
for _name, _function in ON_DEVICE.items():
    _library.impl(_name, _function, "CUDA")  # type: ignore[no-untyped-call]  # torch leaves it untyped
torch.library.register_fake("pageloom::stored_linear", _product, lib=_library)
torch.library.register_fake("pageloom::stored_lines", _lines, lib=_library)


class StoredLinear(nn.Module):
    """See `engine.models.layers.Linear`."""

    levels: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    fixed: bool
    """a row's bits do not depend on how many there are"""

    def __init__(
        self,
        matrix: Matrix,
        bias: torch.Tensor | None = None,
        activation: Activation | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("levels", matrix.levels)
        self.register_buffer("scales", matrix.scales)
        self.register_buffer("bias", bias)
        self.format, self.activation, self.gated = matrix.format, activation, gated
        self.fixed = False

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, k]: `norm` is applied to it first; `residual` [tokens, outputs] is added to the result."""
        if norm is not None:
            x = norm(x)
        y = torch.ops.pageloom.stored_linear(x, self.levels, self.scales, self.bias, self.format, self.fixed)
        return finished(y, self.activation, self.gated, residual)


class StoredEmbedding(nn.Module):
    """Looks tokens up in a quantised matrix [vocabulary, hidden], which the unembedding may share."""

    levels: torch.Tensor
    scales: torch.Tensor | None

    def __init__(self, matrix: Matrix, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("levels", matrix.levels)
        self.register_buffer("scales", matrix.scales)
        self.format, self.k, self.dtype = matrix.format, k, dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] → [tokens, k]."""
        rows: torch.Tensor = torch.ops.pageloom.stored_lines(
            input_ids, self.levels, self.scales, self.format, self.k, self.dtype
        )
        return rows


class StoredExperts(nn.Module):
    """See `engine.models.experts.Experts`; matrices of all experts one after another."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None
    down_scales: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    places: torch.Tensor | None
    fixed: bool
    """as of `StoredLinear`"""

    def __init__(
        self,
        gate_up: Matrix,
        down: Matrix,
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        gate: Gate,
        places: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, matrix, bias in (("gate_up", gate_up, biases[0]), ("down", down, biases[1])):
            self.register_buffer(name, matrix.levels)
            self.register_buffer(f"{name}_scales", matrix.scales)
            self.register_buffer(f"{name}_bias", bias)
        self.register_buffer("places", places)
        self.formats, self.gate = (gate_up.format, down.format), gate
        self.fixed = False

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden], normed already; ids and factors [tokens, top_k], as `Router` returns them. `residual`
        [tokens, hidden] is added to the result."""
        gate_up = Matrix(self.gate_up, self.gate_up_scales, self.formats[0])
        down = Matrix(self.down, self.down_scales, self.formats[1])
        own = ids if self.places is None else self.places[ids]
        biases = (self.gate_up_bias, self.down_bias)
        return mixture(x, own, factors, gate_up, down, biases, residual, self.gate, self.fixed)
