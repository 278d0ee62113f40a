"""RoPE tables equal those of transformers, for every kind and for what a config may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import LLAMA3, SHAPE, YARN, longrope
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from engine.models.families.llama import llama_spec
from engine.models.families.phi3 import phi3_spec
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


def test_longrope_takes_one_list_of_factors_for_a_whole_table() -> None:
    """By how many positions there are, in the order of transformers, which decides by the sequence's length."""
    shape = {**SHAPE, "max_position_embeddings": 128, "original_max_position_embeddings": 32, "pad_token_id": None}
    config = Phi3Config(**shape, rope_parameters=longrope(12, 0.75))
    (rope,) = phi3_spec(config.to_dict()).ropes
    assert rope.rotary_dim == 12
    for count in (32, 33, 128):
        cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(count)[None])
        expected = torch.cat((cos[0, :, :6], sin[0, :, :6]), dim=-1)
        torch.testing.assert_close(rope_table(rope, count), expected, rtol=0, atol=1e-6)
    assert (rope_table(rope, 32) - rope_table(rope, 33)[:32]).abs().max() > 0.1
