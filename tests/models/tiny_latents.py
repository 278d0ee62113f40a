"""Tiny transformers models with latent attention: one for every feature of the families that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, Mistral4Config


def latents(shape: dict[str, Any], yarn: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """`shape`: of a tiny model; `yarn`: a rope."""
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    shape = {**shape, **sizes, "num_key_value_heads": 4, "pad_token_id": None}
    shape |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 2}
    behind: dict[str, Any] = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.8}
    groups: dict[str, Any] = {"n_group": 4, "topk_group": 2}
    yarn = {**yarn, "mscale": 1.0, "mscale_all_dim": 0.7}
    return {
        "deepseek_v2": lambda: DeepseekV2Config(**{**shape, "q_lora_rank": None}, **behind),
        "deepseek_v2_groups": lambda: DeepseekV2Config(
            **shape, **behind, **groups, topk_method="group_limited_greedy", rope_parameters=dict(yarn)
        ),
        "deepseek_v3": lambda: DeepseekV3Config(**shape, **behind, **groups, rope_parameters=dict(yarn)),
        "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**shape, routed_scaling_factor=1.8),
        "mistral4": lambda: Mistral4Config(
            **shape, **behind, **groups, rope_parameters={**yarn, "llama_4_scaling_beta": 0.3}
        ),
    }
