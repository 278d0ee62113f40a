"""What the configs of families beside Llama and Gemma say that Llama's do not, from GGUF metadata."""

from __future__ import annotations

import struct

from engine.errors import UnsupportedModelError, WeightsError
from engine.models.bounds import ROPE_FACTORS
from engine.models.gguf_header import GgufHeader
from engine.models.gguf_numbers import number, optional, required


def family_config(header: GgufHeader, arch: str, head_dim: int) -> dict[str, object]:
    """Keys that replace, or join, those of a Llama config."""
    tensors = header.tensors
    match arch:
        case "phi3" | "glm4":
            window = optional(header, f"{arch}.attention.sliding_window")
            rotary = optional(header, f"{arch}.rope.dimension_count") or head_dim
            bias = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
            common: dict[str, object] = {
                "partial_rotary_factor": rotary / head_dim,
                "sliding_window": window,
                "attention_bias": bias,
            }
            original = optional(header, f"{arch}.rope.scaling.original_context_length")
            return common if original is None else common | {"original_max_position_embeddings": original}
        case "granite" | "granitemoe":
            named = {
                "attention_multiplier": "attention.scale",
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            }
            return {name: number(header, f"{arch}.{key}", name) or 1.0 for name, key in named.items()}
        case "seed_oss":
            return {"attention_out_bias": "blk.0.attn_output.bias" in tensors}
        case "ernie4_5":
            return {"use_bias": "blk.0.attn_q.bias" in tensors}
        case "olmo2" | "exaone4":
            window = optional(header, f"{arch}.attention.sliding_window")
            if window is not None:
                key = f"{arch}.attention.sliding_window"
                raise UnsupportedModelError(f"{header.path}: metadata {key} ({window}) is not supported")
            return {"sliding_window": None}
        case "starcoder2":
            window = optional(header, f"{arch}.attention.sliding_window")
            return {
                "hidden_act": "gelu_pytorch_tanh",
                "norm_epsilon": number(header, f"{arch}.attention.layer_norm_epsilon", "norm_epsilon"),
                "use_bias": "blk.0.attn_q.bias" in tensors,
                "sliding_window": window,
            }
        case _:
            return {}


def longrope_parameters(header: GgufHeader, arch: str) -> dict[str, object]:
    """Phi-3's: two lists of divisors, as tensors."""
    parameters: dict[str, object] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": required(header, f"{arch}.rope.scaling.original_context_length"),
    }
    for length in ("short", "long"):
        name = f"rope_factors_{length}.weight"
        tensor = header.tensors.get(name)
        if tensor is None or tensor.encoding.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > ROPE_FACTORS:
            raise WeightsError(f"{header.path}: {name} is missing, or no list of at most {ROPE_FACTORS} float32")
        with open(header.path, "rb") as file:
            file.seek(tensor.offset)
            parameters[f"{length}_factor"] = list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.size_bytes)))
    scale = number(header, f"{arch}.rope.scaling.attn_factor", "attention_factor")
    return parameters if scale is None else parameters | {"attention_factor": scale}
