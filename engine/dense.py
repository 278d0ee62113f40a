"""Layers behind pooling: sentence-transformers' Dense modules, of which a model has one or two. A few products for each
prompt, in NumPy, where its parts are put together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from engine.errors import WeightsError
from engine.models.pooling import DenseSpec


class DenseLayer(msgspec.Struct, frozen=True, kw_only=True):
    weight: np.ndarray
    """float32 [outputs, inputs]"""
    bias: np.ndarray | None
    activation: Literal["tanh", "identity"]

    def of(self, vectors: np.ndarray) -> np.ndarray:
        """float32 [vectors, inputs] → [vectors, outputs]."""
        found: np.ndarray = vectors @ self.weight.T
        if self.bias is not None:
            found = found + self.bias
        return np.tanh(found) if self.activation == "tanh" else found


def load_dense(specs: Iterable[DenseSpec], size: int) -> tuple[DenseLayer, ...]:
    """`size`: of the vectors that the first is given. Raises `WeightsError`."""
    layers = []
    for spec in specs:
        layers.append(_load(spec, size))
        size = len(layers[-1].weight)
    return tuple(layers)


def _load(spec: DenseSpec, size: int) -> DenseLayer:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = Path(spec.directory) / "model.safetensors"
    try:
        found = {name: tensor.astype(np.float32) for name, tensor in load_file(file).items()}
    except (OSError, SafetensorError, TypeError, KeyError) as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    weight, bias = found.get("linear.weight"), found.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != size:
        shape = None if weight is None else weight.shape
        raise WeightsError(f"{file}: linear.weight has shape {shape}, expected [outputs, {size}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise WeightsError(f"{file}: linear.bias has shape {bias.shape}, expected {weight.shape[:1]}")
    return DenseLayer(weight=weight, bias=bias, activation=spec.activation)
