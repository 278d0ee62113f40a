"""A GGUF file of every family gives the logits of the model that it was converted from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dense_attention import logits_of
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, quants
from gguf_mixtures import add_mixture
from gguf_models import write_gguf
from tiny_models import GEMMA, LLAMA3, SHAPE, TWO_BASES, hf_logits, make_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from engine.errors import UnsupportedModelError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.weights.loader import load_weights

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()
FILES = ["llama", "llama_tied", "llama_biases", "llama_head_dim", "llama_yarn_rope", "qwen2", "qwen3"]
FILES += ["phi3", "phi3_long_rope", "phi3_short_rope_window", "smollm3", "granite", "granite_tied", "olmo2", "glm4"]
FILES += ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "glm4_moe_groups", "dots1", "minimax_m2"]
FILES += ["granitemoe", "granitemoeshared"]
FILES += ["gemma4", "gemma4_layer_inputs", "gemma4_mixture"]
FILES += ["seed_oss", "hunyuan", "ernie4_5", "ernie4_5_biases_untied", "exaone4", "starcoder2"]


def logits_of_file(path: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    description = describe(path)
    model = Decoder(description.spec, dtype=dtype)
    load_weights(model, description)
    return logits_of(model, PROMPT)


@pytest.mark.parametrize("case", FILES)
def test_float32_file_gives_the_logits_of_its_origin(case: str, tmp_path: Path) -> None:
    origin = make_model(case)
    path = write_gguf(origin, tmp_path / "model.gguf")
    description = describe(path)
    assert description.default_dtype == "float32"
    assert description.eos_token_ids == (5, 6)
    torch.testing.assert_close(logits_of_file(path), hf_logits(origin, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_encoded_matrices_give_the_logits_of_a_model_with_the_decoded_ones(name: str, tmp_path: Path) -> None:
    encoding = GGMLQuantizationType[name]
    origin = make_model("llama_biases")
    path = write_gguf(origin, tmp_path / "model.gguf", encoding)
    with torch.no_grad():
        for parameter in origin.parameters():
            if parameter.ndim > 1:
                decoded = quants.dequantize(quants.quantize(parameter.numpy(), encoding), encoding)
                parameter.copy_(torch.from_numpy(decoded.reshape(parameter.shape).copy()))
    torch.testing.assert_close(logits_of_file(path), hf_logits(origin, PROMPT), rtol=1e-4, atol=1e-4)


def llama3_model(factor: float, original: int) -> PreTrainedModel:
    torch.manual_seed(0)
    rope = {**LLAMA3, "rope_theta": 500000.0, "factor": factor, "original_max_position_embeddings": original}
    config = LlamaConfig(**{**SHAPE, "max_position_embeddings": 16384}, head_dim=64, rope_parameters=rope)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_llama3_frequencies_are_recovered_from_the_divisors_that_llama_cpp_stores(tmp_path: Path) -> None:
    origin = llama3_model(32.0, 8192)
    path = write_gguf(origin, tmp_path / "model.gguf")
    (rope,) = describe(path).spec.ropes
    assert rope.kind == "llama3"
    assert rope.params["factor"] == 32.0
    torch.testing.assert_close(logits_of_file(path), hf_logits(origin, PROMPT), rtol=1e-4, atol=1e-4)


def test_divisors_of_an_unknown_rule_are_refused(tmp_path: Path) -> None:
    path = write_gguf(llama3_model(32.0, 4096), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        describe(path)


def test_gemma_4_frequencies_that_are_divided_in_another_way_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_model("gemma4"), path)
    huge, small = (np.array([value], dtype=np.float32).tobytes() for value in (1e30, 8.0))
    whole = path.read_bytes()
    assert huge in whole
    path.write_bytes(whole.replace(huge, small))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight must hold 1, then 1e30"):
        describe(str(path))


@pytest.mark.parametrize(
    ("said", "served"), [(ExpertGatingFuncType.SIGMOID, True), (ExpertGatingFuncType.SOFTMAX, False)]
)
def test_a_file_whose_experts_are_scored_otherwise_is_refused(
    said: ExpertGatingFuncType, served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(writer: GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
        add_mixture(writer, config, head_dim)
        writer.add_expert_gating_func(said)

    monkeypatch.setattr("gguf_models.add_mixture", add)
    path = write_gguf(make_model("glm4_moe"), tmp_path / "model.gguf")
    if served:
        assert describe(path).spec.layers[-1].experts.router.kind == "sigmoid"
        return
    with pytest.raises(UnsupportedModelError, match="expert_gating_func 1 is not supported; 2 is"):
        describe(path)


def gemma_model(kind: type[Gemma2Config] | type[Gemma3TextConfig], **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {**GEMMA, "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5}
    return AutoModelForCausalLM.from_config(kind(**shape, **options), attn_implementation="eager").eval()


@pytest.mark.parametrize("generation", [2, 3])
def test_a_gemma_file_gives_the_logits_of_its_origin(generation: int, tmp_path: Path) -> None:
    if generation == 2:
        origin = gemma_model(Gemma2Config, attn_logit_softcapping=4.0, final_logit_softcapping=10.0)
    else:
        origin = gemma_model(Gemma3TextConfig, rope_parameters=dict(TWO_BASES))
    with torch.no_grad():
        for name, parameter in origin.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.4, 3.0)
    path = write_gguf(origin, tmp_path / "model.gguf")
    torch.testing.assert_close(logits_of_file(path), hf_logits(origin, PROMPT), rtol=1e-4, atol=1e-4)


def test_gemma_27b_scales_queries_by_its_width(tmp_path: Path) -> None:
    """62 layers are what llama.cpp knows it by, too."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 62, "hidden_size": 32, "query_pre_attn_scalar": 8})
    path = write_gguf(AutoModelForCausalLM.from_config(config), tmp_path / "model.gguf")
    assert describe(path).facts.layers[0].scale == 8**-0.5


def test_linear_rope_is_read(tmp_path: Path) -> None:
    origin = make_model("llama_linear_rope")
    path = write_gguf(origin, tmp_path / "model.gguf")
    assert describe(path).spec.ropes[0].kind == "linear"
    torch.testing.assert_close(logits_of_file(path), hf_logits(origin, PROMPT), rtol=1e-4, atol=1e-4)
