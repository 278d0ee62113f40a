"""Aliases that do not own: what a graph leaves behind in the pool must not keep the pool's memory taken."""

from __future__ import annotations

import torch
from torch import Tensor


def weak_alias(tensor: Tensor) -> Tensor:
    """A tensor with the address, shape, strides and dtype of `tensor` that does not keep its memory alive.

    Whoever holds it knows why the address stays valid; reading it after the memory was returned to the system is
    undefined. It is an ordinary tensor even if made in inference mode, so that it may be written inside and outside of
    it.
    """
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if storage.nbytes() == 0:
            return alias.new_empty(tensor.shape)
        view = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        return alias.set_(view, tensor.storage_offset(), tensor.shape, tensor.stride())
