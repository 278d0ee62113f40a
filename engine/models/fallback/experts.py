"""Experts of a library's model: what the library's `ExpertsInterface` calls. What stands between an expert's matrices
(its gate, its norms) is the model's own code, and traced."""

from __future__ import annotations

from typing import Any

import torch

from engine.models.expert_op import expert_linear

EXPERTS = "pageloom"


def experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """What `ExpertsInterface` calls: hidden [tokens, hidden_size], chosen and factors [tokens, choices]."""
    choices, ids = chosen.size(-1), chosen.reshape(-1)
    name = "gate_up_proj" if module.has_gate else "up_proj"
    biases = [getattr(module, f"{each}_bias") if module.has_bias else None for each in (name, "down_proj")]
    rows = hidden.repeat_interleave(choices, dim=0)
    inner = expert_linear(rows, ids, getattr(module, name), biases[0], module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = expert_linear(inner, ids, module.down_proj, biases[1], module.is_transposed)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weighted: torch.Tensor = (out * factors.reshape(-1, 1)).view(hidden.size(0), choices, -1)
    return weighted.sum(dim=1).to(hidden.dtype)
