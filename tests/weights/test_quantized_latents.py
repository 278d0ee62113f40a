"""Quantised checkpoints of models with latent attention: what makes keys and values of latents is read into floats."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from stored_forms import FORMS, quantized_model
from transformers import DeepseekV3Config

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from dense_attention import logits_of
from tiny_models import hf_logits

from engine.config import EngineArgs
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.resolve import resolve_here
from engine.runner.loading import load_parts
from engine.weights.loader import load_weights
from engine.weights.sizes import stored_weight_bytes

DENSE = DeepseekV3Config(
    vocab_size=224,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    max_position_embeddings=256,
    initializer_range=0.1,
)
PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp8_blocks", "gptq_symmetric"])
def test_the_model_is_that_of_the_checkpoint_and_takes_what_is_told(form: str, tmp_path: Path) -> None:
    """Rows of pairs that turn are in another order there, and blocks of 128 rows have a scale."""
    reference = quantized_model(DENSE, FORMS[form], tmp_path)
    description = describe(str(tmp_path))
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    torch.testing.assert_close(logits_of(model, PROMPT), hf_logits(reference, PROMPT), rtol=1e-4, atol=1e-4)
    config = resolve_here(EngineArgs(model=str(tmp_path), device="cpu"))[1]
    assert description.quantized is not None
    told = stored_weight_bytes(str(tmp_path), description.quantized, description.spec)
    assert told == load_parts(config).weight_bytes
