"""Writes a tiny transformers model as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf_gemma4 import add_gemma4
from gguf_mixtures import add_mixture, gguf_parts
from transformers import PreTrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3": MODEL_ARCH.GEMMA3,
    "gemma4": MODEL_ARCH.GEMMA4,
    "phi3": MODEL_ARCH.PHI3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "olmo2": MODEL_ARCH.OLMO2,
    "glm4": MODEL_ARCH.GLM4,
    "seed_oss": MODEL_ARCH.SEED_OSS,
    "hunyuan-dense": MODEL_ARCH.HUNYUAN_DENSE,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "exaone4": MODEL_ARCH.EXAONE4,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "qwen2moe": MODEL_ARCH.QWEN2MOE,
    "qwen3moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "gpt-oss": MODEL_ARCH.GPT_OSS,
    "granitemoe": MODEL_ARCH.GRANITE_MOE,
    "glm4moe": MODEL_ARCH.GLM4_MOE,
    "dots1": MODEL_ARCH.DOTS1,
    "minimax-m2": MODEL_ARCH.MINIMAXM2,
    "llama4": MODEL_ARCH.LLAMA4,
}
NAMES = {
    "hunyuan_v1_dense": "hunyuan-dense",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
}
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")
"""whose Q and K rows llama.cpp's converter reorders"""


_Encode = Callable[[np.ndarray, GGMLQuantizationType], np.ndarray]


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    encoding: GGMLQuantizationType = GGMLQuantizationType.F32,
    encode: _Encode = quants.quantize,
) -> str:
    """Matrices in `encoding`, vectors in F32, as llama.cpp stores them; Llama's Q and K rows in llama.cpp's order, 1
    added to Gemma's norms."""
    config = deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's, whose layers differ
    arch = NAMES.get(config.model_type, config.model_type.removesuffix("_text"))
    writer = GGUFWriter(str(path), arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", None) or config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if arch == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_token_list([f"token{index}" for index in range(2000)])
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(6)
    ropes = config.rope_parameters
    _add_rope(writer, ropes.get("full_attention", ropes), head_dim)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
        if arch == "gemma2":
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    _add_numbers(writer, config, head_dim)
    add_mixture(writer, config, head_dim)
    name_map = get_tensor_name_map(ARCHITECTURES[arch], config.num_hidden_layers)
    for name, tensor in gguf_parts(model):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        plain = values.ndim < 2 or name.endswith((".bias", "gate.weight", "router.weight"))
        stored = GGMLQuantizationType.F32 if plain else encoding
        short = name_map.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert short is not None, name
        short += "" if short.endswith((".weight", ".bias", ".scale")) else ".weight"
        writer.add_tensor(short, encode(np.ascontiguousarray(values), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _add_numbers(writer: GGUFWriter, config: PreTrainedConfig, head_dim: int) -> None:
    """What single families have."""
    arch = writer.arch
    if arch == "gemma4":
        add_gemma4(writer, config)
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch in ("phi3", "glm4"):
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if arch in ("phi3", "starcoder2") and config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)


def _add_rope(writer: GGUFWriter, rope: dict[str, float], head_dim: int) -> None:
    theta, kind = rope["rope_theta"], rope["rope_type"]
    writer.add_rope_freq_base(theta)
    if kind == "llama3":
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        divisors = []
        for index in range(head_dim // 2):
            turns = rope["original_max_position_embeddings"] / (2 * math.pi * theta ** (2 * index / head_dim))
            smooth = float(turns > high) if low == high else min(max((turns - low) / (high - low), 0), 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    elif kind == "yarn":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(256 / original) / math.log(original)))
    elif kind == "linear":
        writer.add_string(f"{writer.arch}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
