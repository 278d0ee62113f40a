"""What publishers' files hold beside, or write otherwise than, what our own tests make: AutoRound's two packers, what
AutoGPTQ adds, scales of static activations, the same weights in a maker's form, layers that predict further tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_forms import FORMS, Form, gptq, quantized_llama, write

sys.path.append(str(Path(__file__).parents[1] / "models"))
from dense_attention import logits_of
from test_packed_models import PROMPT
from tiny_models import hf_logits, make_model

from engine.errors import ConfigError, WeightsError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.quantization import stored_format
from engine.weights.loader import load_weights
from engine.weights.sizes import stored_weight_bytes


def loaded(path: Path) -> Decoder:
    description = describe(str(path), "native")
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    return model


@pytest.mark.parametrize(
    ("said", "offset"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, 1),
        ({"packing_format": "auto_round"}, 0),
        ({"packing_format": "auto_round:gptqmodel"}, 0),
        ({"backend": "auto_round:exllamav2"}, 0),
        ({"backend": "auto_round:gptq:exllamav2"}, 1),
        ({"backend": "auto"}, 1),
        ({}, 1),
    ],
)
def test_zero_points_of_auto_round_are_those_of_its_packer(said: dict[str, str], offset: int, tmp_path: Path) -> None:
    config: dict[str, Any] = {**FORMS["auto_round"].config, "packing_format": None, **said}
    found = stored_format({"quantization_config": config})
    assert found is not None and found.zero_offset == offset
    form = Form(config, gptq(offset=offset), FORMS["auto_round"].format)
    reference = quantized_llama(form, tmp_path)
    assert torch.allclose(logits_of(loaded(tmp_path), PROMPT), hf_logits(reference, PROMPT), atol=1e-3, rtol=1e-3)


def test_biases_that_auto_gptq_added_may_be_there_while_they_are_zero(tmp_path: Path) -> None:
    reference = quantized_llama(FORMS["gptq"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    added = "model.layers.0.mlp.down_proj.bias"
    save_file({**tensors, added: torch.zeros(128, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert torch.allclose(logits_of(loaded(tmp_path), PROMPT), hf_logits(reference, PROMPT), atol=1e-3, rtol=1e-3)
    save_file({**tensors, added: torch.ones(128, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"tensor {added} is not part of a llama model"):
        loaded(tmp_path)
    save_file({**tensors, added: torch.zeros(64, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"tensor {added} is not part of a llama model"):
        loaded(tmp_path)


def test_scales_of_static_activations_are_left_out_under_each_name(tmp_path: Path) -> None:
    reference = quantized_llama(FORMS["fp8_tensor"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.down_proj.{name}": torch.ones(()) for name in ("input_scale", "activation_scale")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.allclose(logits_of(loaded(tmp_path), PROMPT), hf_logits(reference, PROMPT), atol=1e-3, rtol=1e-3)


def test_the_same_weights_in_their_makers_form_are_neither_read_nor_planned(tmp_path: Path) -> None:
    quantized_llama(FORMS["fp8_tensor"], tmp_path)
    description = describe(str(tmp_path))
    assert description.quantized is not None
    alone = stored_weight_bytes(str(tmp_path), description.quantized, description.spec)
    other = {"layers.0.feed_forward.w2.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    save_file(other, tmp_path / "consolidated.safetensors")
    assert stored_weight_bytes(str(tmp_path), description.quantized, description.spec) == alone
    loaded(tmp_path)


def test_layers_of_ernie_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    reference = make_model("ernie4_5_moe")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = ("mtp_block.0.mlp.up_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    tensors |= {f"model.{name}.weight": torch.ones(4, 4) for name in names}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.allclose(logits_of(loaded(tmp_path), PROMPT), hf_logits(reference, PROMPT), atol=1e-3, rtol=1e-3)


def test_the_state_of_a_quantised_matrix_has_a_bound(tmp_path: Path) -> None:
    """bitsandbytes' JSON, which would be made a list of numbers."""
    from library_forms import LIBRARY_FORMS

    form = next(form for name, form in LIBRARY_FORMS.items() if "nf4" in name)
    quantized_llama(form, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = next(name for name in tensors if "quant_state.bitsandbytes__" in name)
    write(tmp_path, {**tensors, state: torch.full((100_000,), 32, dtype=torch.uint8)})
    with pytest.raises((WeightsError, ConfigError), match="at most 1024 bytes"):
        loaded(tmp_path)
