"""In bfloat16 the last norm of every family rounds where transformers' does: bits are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_family_parity import ours
from tiny_models import CASES, LATENT, STATEFUL, make_model, save
from torch import nn

_LAST = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")
"""what it is called in transformers"""
_NONE = {"opt_norms_after"}


def last_norm(model: nn.Module) -> nn.Module:
    inner = next(child for name, child in model.named_children() if name in ("model", "transformer", "gpt_neox"))
    inner = getattr(inner, "decoder", inner)
    return next(found for name in _LAST if (found := getattr(inner, name, None)) is not None)


@pytest.mark.parametrize("case", [case for case in [*CASES, *STATEFUL, *LATENT] if case not in _NONE])
def test_the_last_norm_rounds_where_transformers_does(case: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    reference = make_model(case).to(torch.bfloat16)
    theirs = last_norm(reference)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape).to(torch.bfloat16) / 4)
    norm = ours(save(reference, tmp_path), torch.bfloat16).norm
    assert norm is not None
    norm.eps = getattr(theirs, "variance_epsilon", getattr(theirs, "eps", None))  # of what is scaled: folded into it
    x = 3 * torch.randn(64, norm.weight.numel()).to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(norm(x), theirs(x))
