"""Tiny transformers models with experts: one for every feature of the families that have some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    Dots1Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_SCOUTS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def mixtures(shape: dict[str, Any], granite: dict[str, Any], yarn: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """`shape`: of a tiny model; `granite`: its multipliers; `yarn`: a rope."""
    no_padding: dict[str, Any] = {"pad_token_id": None}
    five = {**shape, "num_hidden_layers": 5}
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    local: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 3}
    routed: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
    }
    return {
        "mixtral": lambda: MixtralConfig(**shape, **local),
        "mixtral_window": lambda: MixtralConfig(**shape, **local, sliding_window=16, head_dim=32),
        "qwen2_moe": lambda: Qwen2MoeConfig(**shape, **experts, shared_expert_intermediate_size=80),
        "qwen3_moe": lambda: Qwen3MoeConfig(**shape, **experts, head_dim=32, norm_topk_prob=True),
        "qwen3_moe_dense_layer": lambda: Qwen3MoeConfig(
            **shape, **experts, head_dim=16, attention_bias=True, decoder_sparse_step=2, mlp_only_layers=[]
        ),
        "olmoe": lambda: OlmoeConfig(**shape, num_experts=6, num_experts_per_tok=3, **no_padding),
        "gpt_oss": lambda: GptOssConfig(
            **five, **local, head_dim=32, sliding_window=16, rope_parameters={**yarn, "truncate": False}
        ),
        "glm4_moe": lambda: Glm4MoeConfig(**shape, **routed, head_dim=32, use_qk_norm=True, attention_bias=True),
        "glm4_moe_groups": lambda: Glm4MoeConfig(**shape, **routed, n_group=4, topk_group=2, first_k_dense_replace=0),
        "dots1": lambda: Dots1Config(
            **shape, **routed, sliding_window=None, first_k_dense_replace=1, norm_topk_prob=True
        ),
        "dots1_windows": lambda: Dots1Config(**shape, **routed, sliding_window=16, max_window_layers=1),
        "minimax_m2": lambda: MiniMaxM2Config(**shape, **local, head_dim=32, rotary_dim=16),
        "granitemoe": lambda: GraniteMoeConfig(**shape, **local, **granite),
        "granitemoeshared": lambda: GraniteMoeSharedConfig(**shape, **local, **granite, shared_intermediate_size=80),
        "hunyuan_moe": lambda: HunYuanMoEV1Config(
            **shape, **no_padding, num_experts=6, moe_topk=[2, 2, 2], head_dim=32, eod_token_id=3
        ),
        "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(
            **shape,
            moe_num_experts=6,
            moe_k=3,
            moe_intermediate_size=48,
            moe_layer_start_index=1,
            tie_word_embeddings=False,
        ),
        **_llama4(five),
    }


def _llama4(shape: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    shape = {**shape, "pad_token_id": None, "head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 80}
    return {
        "llama4": lambda: Llama4TextConfig(
            **shape, interleave_moe_layer_step=2, attention_chunk_size=16, floor_scale=8, attn_scale=0.5
        ),
        "llama4_as_published": lambda: Llama4TextConfig(**shape, rope_parameters=dict(_SCOUTS_ROPE)),
        "llama4_dense": lambda: Llama4TextConfig(
            **shape,
            moe_layers=[],
            no_rope_layers=[1, 0, 1, 0, 1],
            attention_chunk_size=None,
            attn_temperature_tuning=False,
            use_qk_norm=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    }
