"""Latent layers of the `cuda` backend: Triton kernels under the interpreter against the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latent_case import LatentCase
from test_page_kernels import run

from attention_backends.cuda_latents import MOST_ROWS, workspace_bytes

HERE = Path(__file__).parent


def test_latent_layers_give_the_equation(pytestconfig: pytest.Config) -> None:
    pytest.importorskip("triton")
    more = ["exhaustive"] if pytestconfig.getoption("exhaustive") else []
    printed = run([str(HERE / "interpret_latent_kernels.py"), *more], TRITON_INTERPRET="1")
    assert printed.count("equal") == (19 if more else 12)


def test_the_workspace_holds_absorbed_queries_and_what_is_merged() -> None:
    layer = LatentCase([(1, 1)], dtype=torch.bfloat16, rank=512, common=64, made=128, value_dim=128).layer
    assert workspace_bytes([layer, layer], 132) == MOST_ROWS * (2 * 512 + 128) * 2 + 2 * 264 * 32 * 513 * 4
    assert workspace_bytes([], 132) == 0
