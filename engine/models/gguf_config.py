"""GGUF metadata to the Hugging Face config that the same model would have, so that one family function serves both.

transformers' own conversion needs seconds (it imports the library and reads the whole vocabulary) and drops what
matters for right answers: Llama 3's `rope_freqs` and, in some versions, YaRN.
"""

from __future__ import annotations

import math
import struct

from engine.errors import UnsupportedModelError, WeightsError
from engine.models.bounds import CONFIG_RANGES
from engine.models.gguf_families import family_config, longrope_parameters
from engine.models.gguf_gemma4 import gemma4_config
from engine.models.gguf_header import GgufHeader
from engine.models.gguf_mixtures import mixture_config
from engine.models.gguf_numbers import number as _number
from engine.models.gguf_numbers import optional as _optional
from engine.models.gguf_numbers import required as _required
from engine.models.json_file import shown

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeSharedForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "llama4": "Llama4ForCausalLM",
}
WITH_EXPERTS = {"llama": "MixtralForCausalLM"}
"""architectures that are of another family where they have experts"""
_LAYER_NORMS = frozenset({"starcoder2"})
_PARTIAL = frozenset({"phi3", "glm4", "glm4moe", "minimax-m2"})
"""whose heads may turn in part"""
_WIDE_QUERIES = {"gemma2": 46, "gemma3": 62}
"""layers of the 27B models, which scale queries by hidden_size / heads; the file does not say so"""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA4 = {**_LLAMA3, "high_freq_factor": 1.0}
_DEFAULTS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_config_of(header: GgufHeader) -> dict[str, object]:
    """Raises UnsupportedModelError for another architecture, WeightsError for missing metadata."""
    arch = header.text("general.architecture")
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"{header.path}: architecture {arch!r} is not supported; supported are {supported}")
    if "token_embd.weight" not in header.tensors:
        raise WeightsError(f"{header.path}: tensor token_embd.weight is missing")
    config, layers = _common(header, arch), _num_layers(header, arch)
    if arch == "gemma4":
        return config | gemma4_config(header, layers)
    hidden_size, num_heads = (
        _required(header, f"{arch}.{key}") for key in ("embedding_length", "attention.head_count")
    )
    head_dim = _head_dim(header, arch, hidden_size, num_heads)
    config |= {
        "intermediate_size": _required(header, f"{arch}.feed_forward_length"),
        "num_key_value_heads": _optional(header, f"{arch}.attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rope_parameters": _rope_parameters(header, arch, head_dim),
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
    }
    if header.integer(f"{arch}.expert_count"):
        config |= mixture_config(header, arch, head_dim, layers)
    return config | (_gemma(header, arch, config) if arch in _WIDE_QUERIES else family_config(header, arch, head_dim))


def _common(header: GgufHeader, arch: str) -> dict[str, object]:
    """What is said of every model in the same way."""
    mixed = bool(header.integer(f"{arch}.expert_count"))
    epsilon_key = f"{arch}.attention.layer_norm_{'' if arch in _LAYER_NORMS else 'rms_'}epsilon"
    epsilon = _number(header, epsilon_key, "rms_norm_eps")
    if epsilon is None:
        raise WeightsError(f"{header.path}: metadata {epsilon_key} is missing")
    tensors = header.tensors
    return {
        "architectures": [WITH_EXPERTS.get(arch, ARCHITECTURES[arch]) if mixed else ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": _required(header, f"{arch}.embedding_length"),
        "num_hidden_layers": _num_layers(header, arch),
        "num_attention_heads": _required(header, f"{arch}.attention.head_count"),
        "max_position_embeddings": _required(header, f"{arch}.context_length"),
        "rms_norm_eps": epsilon,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "bos_token_id": header.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(header),
    }


def generation_config_of(header: GgufHeader) -> dict[str, object]:
    """The sampling defaults that newer converters store, under Hugging Face's names."""
    return {name: header.metadata[key] for key, name in _DEFAULTS.items() if key in header.metadata}


def dtype_of(header: GgufHeader) -> str:
    """float32 or float16 when every matrix is stored so; bfloat16 for anything else, quantised weights included."""
    stored = {tensor.encoding.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(stored), "bfloat16")


def _num_layers(header: GgufHeader, arch: str) -> int:
    count = _required(header, f"{arch}.block_count") - (header.integer(f"{arch}.nextn_predict_layers") or 0)
    if count < 1:
        raise WeightsError(f"{header.path}: metadata {arch}.nextn_predict_layers leaves no layer")
    name = "attn_output.weight"
    if f"blk.{count - 1}.{name}" not in header.tensors or (
        f"blk.{_required(header, f'{arch}.block_count')}.{name}" in header.tensors
    ):
        raise WeightsError(f"{header.path}: metadata {arch}.block_count is {count}, the tensors are of another number")
    return count


def _gemma(header: GgufHeader, arch: str, config: dict[str, object]) -> dict[str, object]:
    """What Gemma 2's and 3's configs say beside Llama's."""
    wide = config["num_hidden_layers"] == _WIDE_QUERIES[arch]
    width = _required(header, f"{arch}.embedding_length") / _required(header, f"{arch}.attention.head_count")
    more: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if wide else config["head_dim"],
        "sliding_window": _required(header, f"{arch}.attention.sliding_window"),
        "attn_logit_softcapping": _number(header, f"{arch}.attn_logit_softcapping", "attn_logit_softcapping"),
        "final_logit_softcapping": _number(header, f"{arch}.final_logit_softcapping", "final_logit_softcapping"),
    }
    pattern = f"{arch}.attention.sliding_window_pattern"
    if pattern in header.metadata:
        raise UnsupportedModelError(
            f"{header.path}: {pattern} is not supported: every second (2) or sixth (3) sees all"
        )
    if arch == "gemma3":
        more["model_type"] = "gemma3_text"
        local = _number(header, f"{arch}.rope.freq_base_swa", "rope_theta") or 10000.0
        more["rope_parameters"] = {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return more


def _head_dim(header: GgufHeader, arch: str, hidden_size: int, num_heads: int) -> int:
    key_length = _optional(header, f"{arch}.attention.key_length")
    rotary = _optional(header, f"{arch}.rope.dimension_count")
    head_dim = key_length or (None if arch in _PARTIAL else rotary) or hidden_size // num_heads
    value_length = _optional(header, f"{arch}.attention.value_length") or head_dim
    if value_length != head_dim or ((rotary or head_dim) != head_dim and arch not in _PARTIAL):
        raise UnsupportedModelError(
            f"{header.path}: key length {head_dim}, value length {value_length}, rotary dimensions {rotary} differ"
        )
    return head_dim


def _end_tokens(header: GgufHeader) -> list[int]:
    ids = [header.integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token for token in ids if token is not None))


def _rope_parameters(header: GgufHeader, arch: str, head_dim: int) -> dict[str, object]:
    theta = _number(header, f"{arch}.rope.freq_base", "rope_theta") or 10000.0
    scaling = f"{arch}.rope.scaling"
    kind = header.text(f"{scaling}.type") or "none"
    factor = _number(header, f"{scaling}.factor", "factor") or _number(header, f"{arch}.rope.scale_linear", "factor")
    if "rope_freqs.weight" in header.tensors:
        if kind != "none":
            raise UnsupportedModelError(f"{header.path}: rope_freqs with {scaling}.type {kind!r} is not supported")
        return {"rope_theta": theta, **_llama3_parameters(header, arch, theta, head_dim)}
    if kind == "none" and factor is not None:
        kind = "linear"
    if "rope_factors_long.weight" in header.tensors:
        return {"rope_theta": theta, **longrope_parameters(header, arch)}
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(f"{header.path}: {scaling}.type {kind!r} is not supported (none, linear, yarn are)")
    parameters: dict[str, object] = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
    if arch == "gpt-oss":
        parameters["truncate"] = False  # which files do not say
    original = _optional(header, f"{scaling}.original_context_length")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        value = _number(header, f"{scaling}.yarn_{name}", name)
        if value is not None:
            parameters[name] = value
    extra = _number(header, f"{scaling}.yarn_attn_factor", "attention_factor") or _number(
        header, f"{scaling}.attn_factor", "attention_factor"
    )
    if extra is not None and factor is not None:
        # llama.cpp multiplies this number with YaRN's own magnitude; Hugging Face's attention_factor replaces it.
        parameters["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return parameters


def _llama3_parameters(header: GgufHeader, arch: str, theta: float, head_dim: int) -> dict[str, object]:
    """Recover Llama 3's rule from the per-frequency divisors that llama.cpp stores in its place.

    Every published Llama 3.x uses the same corner frequencies, every Llama 4 one for both corners, and all differ in
    `factor` alone: the largest divisor. The divisors are recomputed from the rule and must agree, so that an unknown
    rule is refused, not approximated.
    """
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.encoding.name != "F32" or tensor.shape != (head_dim // 2,):
        raise WeightsError(f"{header.path}: rope_freqs.weight is {tensor.encoding.name} {tensor.shape}")
    with open(header.path, "rb") as file:
        file.seek(tensor.offset)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.size_bytes))
    factor = max(divisors)
    if not all(divisor >= 1.0 for divisor in divisors) or not CONFIG_RANGES["factor"].holds(factor):
        raise WeightsError(
            f"{header.path}: rope_freqs.weight must hold divisors of at least 1, found {shown(divisors)}"
        )
    numbers = _LLAMA4 if arch == "llama4" else _LLAMA3
    low, high, original = (float(value) for value in numbers.values())
    for index, found in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        turns = original / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0) if high > low else float(turns > high)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if not math.isclose(found, expected, rel_tol=1e-4):
            raise UnsupportedModelError(
                f"{header.path}: rope_freqs.weight[{index}] is {found:g}, Llama 3's rule gives {expected:g}"
            )
    if factor == 1.0:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", "factor": factor, **numbers}
