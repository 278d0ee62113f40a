"""What the configs of families with experts say of them, from GGUF metadata."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.models.gguf_header import GgufHeader
from engine.models.gguf_numbers import number, optional, required

_MAVERICKS_EXPERTS = 128
"""of the Llama 4 that norms neither q nor k, which files do not say"""
_SOFTMAX, _SIGMOID, _OF_THE_CHOSEN = 1, 2, 3
_SCORES = {
    "glm4moe": _SIGMOID,
    "dots1": _SIGMOID,
    "minimax-m2": _SIGMOID,
    "llama4": _SIGMOID,
    "gpt-oss": _OF_THE_CHOSEN,
}
"""how logits become scores, by llama.cpp's numbers, where that is no softmax over all experts"""


def mixture_config(header: GgufHeader, arch: str, head_dim: int, layers: int) -> dict[str, object]:
    """Keys that join those of a Llama config. `layers`: how many the model has. Raises
    UnsupportedModelError, WeightsError."""
    count, used = required(header, f"{arch}.expert_count"), required(header, f"{arch}.expert_used_count")
    inner = optional(header, f"{arch}.expert_feed_forward_length") or required(header, f"{arch}.feed_forward_length")
    shared = optional(header, f"{arch}.expert_shared_feed_forward_length")
    scores, known = header.integer(f"{arch}.expert_gating_func"), _SCORES.get(arch, _SOFTMAX)
    if scores not in (None, 0, known):
        raise UnsupportedModelError(
            f"{header.path}: metadata {arch}.expert_gating_func {scores} is not supported; {known} is"
        )
    chosen: dict[str, object] = {"num_experts_per_tok": used}
    match arch:
        case "llama" | "granitemoe":
            return {**chosen, "num_local_experts": count, "shared_intermediate_size": shared or 0}
        case "qwen2moe" | "qwen3moe" | "olmoe":
            return {
                **chosen,
                "num_experts": count,
                "moe_intermediate_size": inner,
                "shared_expert_intermediate_size": shared,
                "norm_topk_prob": arch == "qwen3moe",
                "mlp_only_layers": [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors],
            }
        case "llama4":
            if header.metadata.get(f"{arch}.attention.sliding_window") == 0:
                raise UnsupportedModelError(f"{header.path}: {arch} files of models without chunks are not supported")
            # Chunks, growth and what does not turn are the same for every file: the defaults of configs.
            return {
                **chosen,
                "num_local_experts": count,
                "intermediate_size": inner,
                "intermediate_size_mlp": required(header, f"{arch}.feed_forward_length"),
                "moe_layers": [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in header.tensors],
                "use_qk_norm": count != _MAVERICKS_EXPERTS,
            }
        case "gpt-oss":
            window = required(header, f"{arch}.attention.sliding_window")
            return {**chosen, "num_local_experts": count, "intermediate_size": inner, "sliding_window": window}
        case "minimax-m2":
            rotary = optional(header, f"{arch}.rope.dimension_count") or head_dim
            return {**chosen, "num_local_experts": count, "intermediate_size": inner, "rotary_dim": rotary}
        case _:
            return chosen | _deepseek(header, arch, head_dim, count, inner)


def _deepseek(header: GgufHeader, arch: str, head_dim: int, count: int, inner: int) -> dict[str, object]:
    """GLM-4.5's and dots.llm1's."""
    rotary = optional(header, f"{arch}.rope.dimension_count") or head_dim
    return {
        "n_routed_experts": count,
        "moe_intermediate_size": inner,
        "n_shared_experts": optional(header, f"{arch}.expert_shared_count") or 1,
        "first_k_dense_replace": header.integer(f"{arch}.leading_dense_block_count") or 0,
        "routed_scaling_factor": number(header, f"{arch}.expert_weights_scale", "routed_scaling_factor") or 1.0,
        "norm_topk_prob": bool(header.metadata.get(f"{arch}.expert_weights_norm", True)),
        "n_group": optional(header, f"{arch}.expert_group_count") or 1,
        "topk_group": optional(header, f"{arch}.expert_group_used_count") or 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "partial_rotary_factor": rotary / head_dim,
        "sliding_window": None,
    }
