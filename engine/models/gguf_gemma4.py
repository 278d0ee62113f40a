"""Gemma 4's config from GGUF metadata, where layers differ in heads and MLPs."""

from __future__ import annotations

import struct

from engine.errors import UnsupportedModelError, WeightsError
from engine.models.bounds import GGUF_RANGES
from engine.models.gguf_header import GgufHeader
from engine.models.gguf_numbers import number, optional, required
from engine.models.json_file import shown

_NOT_TURNED = 1e29
"""divisors of frequencies that are at least so large stand for what does not turn"""


def gemma4_config(header: GgufHeader, layers: int) -> dict[str, object]:
    """Keys that join those that every model has. Raises UnsupportedModelError, WeightsError."""
    sliding = header.metadata.get("gemma4.attention.sliding_window_pattern")
    if not isinstance(sliding, tuple) or len(sliding) != layers or not all(isinstance(its, bool) for its in sliding):
        key = "gemma4.attention.sliding_window_pattern"
        raise WeightsError(f"{header.path}: metadata {key} must hold true or false for each of {layers} layers")
    shared = header.integer("gemma4.attention.shared_kv_layers") or 0
    own_values = f"blk.{(*sliding, False).index(False)}.attn_v.weight" in header.tensors
    kv_heads = _of_layers(header, "attention.head_count_kv", layers)
    narrow, wide = ({kv_heads[i] for i in range(layers) if sliding[i] is its} for its in (True, False))
    inner = _of_layers(header, "feed_forward_length", layers)
    widened = [inner[0] * (1 + (layer >= layers - shared)) for layer in range(layers)]
    if len(narrow) > 1 or len(wide) > 1 or inner not in ([inner[0]] * layers, widened):
        raise UnsupportedModelError(f"{header.path}: head_count_kv and feed_forward_length may differ by type of layer")
    head_dim, wide_dim = (required(header, f"gemma4.attention.key_length{its}") for its in ("_swa", ""))
    table = header.tensors.get("per_layer_token_embd.weight")
    config: dict[str, object] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner != [inner[0]] * layers,
        "head_dim": head_dim,
        "num_key_value_heads": min(narrow or wide),
        "per_layer_config": {
            str(layer): {"head_dim": wide_dim, "num_key_value_heads": kv_heads[layer]}
            for layer in range(layers)
            if not sliding[layer]
        },
        "attention_k_eq_v": not own_values,
        "num_kv_shared_layers": shared,
        "layer_types": ["sliding_attention" if its else "full_attention" for its in sliding],
        "sliding_window": required(header, "gemma4.attention.sliding_window"),
        "hidden_size_per_layer_input": optional(header, "gemma4.embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "final_logit_softcapping": number(header, "gemma4.final_logit_softcapping", "final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _turned_share(header, wide_dim),
                "rope_theta": number(header, "gemma4.rope.freq_base", "rope_theta") or 1e6,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": number(header, "gemma4.rope.freq_base_swa", "rope_theta") or 1e4,
            },
        },
    }
    if not header.integer("gemma4.expert_count"):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": required(header, "gemma4.expert_count"),
        "top_k_experts": required(header, "gemma4.expert_used_count"),
        "moe_intermediate_size": required(header, "gemma4.expert_feed_forward_length"),
    }


def _of_layers(header: GgufHeader, key: str, layers: int) -> list[int]:
    """One number for all layers, or for each its own."""
    listed, allowed = header.metadata.get(f"gemma4.{key}"), GGUF_RANGES[key]
    if not isinstance(listed, tuple):
        return [required(header, f"gemma4.{key}")] * layers
    numbers = [value for value in listed if isinstance(value, int) and allowed.holds(value)]
    if len(numbers) != layers or len(listed) != layers:
        found = shown(listed)
        raise WeightsError(
            f"{header.path}: metadata gemma4.{key} must hold {layers} numbers in {allowed}, found {found}"
        )
    return numbers


def _turned_share(header: GgufHeader, head_dim: int) -> float:
    """Of the wide heads' pairs: divisors are 1 for those that turn, and huge for those behind."""
    swa = optional(header, "gemma4.rope.dimension_count_swa")
    if swa not in (None, header.integer("gemma4.attention.key_length_swa")):
        raise UnsupportedModelError(f"{header.path}: metadata gemma4.rope.dimension_count_swa {swa} is not supported")
    tensor, pairs = header.tensors.get("rope_freqs.weight"), head_dim // 2
    if tensor is None:
        return 1.0
    if tensor.encoding.name != "F32" or tensor.shape != (pairs,):
        raise WeightsError(f"{header.path}: rope_freqs.weight is {tensor.encoding.name} {tensor.shape}")
    with open(header.path, "rb") as file:
        file.seek(tensor.offset)
        divisors: tuple[float, ...] = struct.unpack(f"<{pairs}f", file.read(tensor.size_bytes))
    turned = sum(divisor == 1.0 for divisor in divisors)
    if not turned or any(divisor < _NOT_TURNED for divisor in divisors[turned:]) or set(divisors[:turned]) != {1.0}:
        raise UnsupportedModelError(f"{header.path}: rope_freqs.weight must hold 1, then 1e30: {shown(divisors)}")
    return turned / pairs
