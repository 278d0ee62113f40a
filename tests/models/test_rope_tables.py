"""RoPE tables equal those of transformers, for every kind and for what a config may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import LLAMA3, SHAPE, YARN
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.families.llama import llama_spec
from engine.models.rope import inverse_frequencies, rope_table

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default_theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3_published": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192, "factor": 32.0},
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_attention_factor": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn_long": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_transformers(kind: str, head_dim: int) -> None:
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": 1024}, head_dim=head_dim, rope_parameters=KINDS[kind])
    theirs = LlamaRotaryEmbedding(config)
    (rope,) = llama_spec(config.to_dict()).ropes
    frequencies, attention_factor = inverse_frequencies(rope, 1024)
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=0, atol=0)
    assert attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    positions = torch.arange(1024)
    cos, sin = theirs(torch.zeros(1, dtype=torch.float32), positions[None])
    table = rope_table(rope, 1024)
    assert table.shape == (1024, head_dim)
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


def test_kinds_differ_from_each_other() -> None:
    """Guards the test above: at these sizes each rule changes the frequencies."""
    seen = []
    for kind in KINDS.values():
        config = LlamaConfig(**SHAPE, head_dim=64, rope_parameters=dict(kind))
        frequencies, factor = inverse_frequencies(llama_spec(config.to_dict()).ropes[0], 1024)
        seen.append((*frequencies.tolist(), factor))
    assert len(set(seen)) == len(seen)
