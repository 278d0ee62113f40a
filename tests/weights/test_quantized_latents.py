"""Quantised checkpoints of models with latent attention: what makes keys and values of latents is read into floats."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_forms import FORMS, quantized_model
from transformers import DeepseekV3Config

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from dense_attention import logits_of
from tiny_models import hf_logits

from engine.config import EngineArgs
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.mtp import MtpHead
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


@torch.no_grad()
@pytest.mark.parametrize("form", ["fp8_blocks", "gptq_symmetric"])
def test_a_head_that_predicts_more_is_read_as_it_is_stored(form: str, tmp_path: Path) -> None:
    """The third of three layers is one behind two; what leads into it is stored plainly."""
    deeper = DeepseekV3Config(**{**DENSE.to_dict(), "num_hidden_layers": 3, "first_k_dense_replace": 3})
    third = quantized_model(deeper, FORMS[form], tmp_path).model.layers[2]
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    changed = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "mlp_layer_types": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changed}))
    size = DENSE.hidden_size
    shapes = {"eh_proj": (size, 2 * size), "enorm": (size,), "hnorm": (size,), "shared_head.norm": (size,)}
    leads = {f"model.layers.2.{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    save_file({**load_file(file), **leads}, file)
    mtp = {"method": "mtp", "num_speculative_tokens": 2}
    for dtype in ("float32", "bfloat16"):
        args = EngineArgs(model=str(tmp_path), device="cpu", dtype=dtype, speculative_config=mtp, compile="none")
        draft = load_parts(resolve_here(args)[1]).draft
        assert draft is not None and isinstance(draft.model, MtpHead)
        (layer,) = draft.model.layers
        if dtype == "float32":
            torch.testing.assert_close(layer.o_proj.weight, third.self_attn.o_proj.weight)
            torch.testing.assert_close(
                layer.gate_up_proj.weight[: len(third.mlp.gate_proj.weight)], third.mlp.gate_proj.weight
            )
            torch.testing.assert_close(draft.model.fc.weight, leads["model.layers.2.eh_proj.weight"])
        else:
            assert layer.o_proj.format == FORMS[form].format
