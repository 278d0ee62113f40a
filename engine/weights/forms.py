"""In which forms a model's weights are kept in memory, for the log of the start."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from engine.cpu_kernels.formats import Format
from engine.kv_cache.ledger import human
from engine.models.device_packed import StoredExperts
from engine.models.rope import RopeTable


def weight_forms(model: nn.Module) -> str:
    """The largest first, as "82.1 MiB q4_1, 9.9 MiB q8_0"; tied weights count once, tables that are computed not."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, RopeTable):
            continue
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) not in seen:
                sizes[_form(module, name, tensor)] += tensor.nbytes
                seen.add(id(tensor))
    return ", ".join(f"{human(size)} {form}" for form, size in sizes.most_common())


def _form(module: nn.Module, name: str, tensor: torch.Tensor) -> str:
    format = getattr(module, f"{name}_format", getattr(module, "format", None))
    if isinstance(module, StoredExperts):
        format = module.formats[0 if name.startswith("gate_up") else 1]
    if tensor.is_floating_point() or format is None:
        return str(tensor.dtype).removeprefix("torch.")
    return Format(format).name.lower()
