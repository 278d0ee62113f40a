"""What llama.cpp's converter makes of a model with experts: metadata, and a tensor for all experts of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gguf import GGUFWriter
from transformers import PreTrainedModel


def add_mixture(writer: GGUFWriter, config: Any, head_dim: int) -> None:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(getattr(config, "top_k_experts", None) or config.num_experts_per_tok)
    inner = getattr(config, "moe_intermediate_size", None)
    if inner or writer.arch in ("gpt-oss", "minimax-m2", "llama4"):
        writer.add_expert_feed_forward_length(inner or config.intermediate_size)
    for key in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        if getattr(config, key, None):
            writer.add_expert_shared_feed_forward_length(getattr(config, key))
    if writer.arch in ("glm4moe", "dots1"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if writer.arch in ("glm4moe", "minimax-m2"):
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
    if writer.arch == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if writer.arch == "gpt-oss":
        writer.add_sliding_window(config.sliding_window)


def gguf_parts(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors under the names that gguf's map knows: stacked gates and ups apart, and no other order within."""
    is_gpt_oss, is_llama4 = (model.config.model_type == name for name in ("gpt_oss", "llama4_text"))
    for name, tensor in model.state_dict().items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(
            "block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"
        )
        if model.config.model_type == "gemma4_text":
            name = name.replace("router.scale", "router.proj.scale")
            yield name.replace("router.per_expert_scale", "experts.down_proj.scale"), tensor
            continue
        path, _, last = name.rpartition(".")
        if "shared_mlp" in path and "input_linear" in path:
            for part, rows in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{path.rpartition('.shared_mlp')[0]}.mlp.shared_experts.{part}.weight", rows
        elif "shared_mlp" in path and "output_linear" in path:
            yield f"{path.rpartition('.shared_mlp')[0]}.mlp.shared_experts.down_proj.weight", tensor
        elif not path.endswith(".experts"):
            yield name, tensor
        else:
            path = path.replace("block_sparse_moe", "mlp")
            ending = "bias" if last.endswith("_bias") else "weight"
            if is_llama4 or (is_gpt_oss and ending == "weight"):
                tensor = tensor.mT
            if last.startswith("down_proj"):
                yield f"{path}.down_proj.{ending}", tensor
                continue
            halves = (tensor[:, 0::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
            for part, rows in zip(("gate_proj", "up_proj"), halves, strict=True):
                yield f"{path}.{part}.{ending}", rows
