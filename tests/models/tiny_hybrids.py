"""Tiny random models whose layers keep states in the place of keys and values, or some of them."""

from __future__ import annotations

from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

DELTA_NET: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "full_attention_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
DELTA_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
MAMBA: dict[str, Any] = {
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "layer_types": ["mamba", "attention", "mamba"],
}
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75,
    "key_multiplier": 0.6,
    "ssm_in_multiplier": 0.8,
    "ssm_multipliers": [0.7, 1.3, 1.2, 0.9, 1.1],
    "ssm_out_multiplier": 0.9,
    "mlp_multipliers": [0.8, 1.2],
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 1.5,
}
KIMI: dict[str, Any] = {
    "num_key_value_heads": 4,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 48,
}


def hybrids(shape: dict[str, Any], granite: dict[str, Any]) -> dict[str, Any]:
    """`granite`: the numbers that Granite multiplies with."""
    deep = {**shape, "num_hidden_layers": 5}
    return {
        **_mambas(shape, granite),
        "lfm2": lambda: Lfm2Config(**deep, layer_types=["conv", "conv", "full_attention", "conv", "full_attention"]),
        "lfm2_biases_untied": lambda: Lfm2Config(
            **shape,
            full_attn_idxs=[1],
            conv_bias=True,
            conv_L_cache=5,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        ),
        "lfm2_moe": lambda: Lfm2MoeConfig(
            **deep,
            layer_types=["conv", "full_attention", "conv", "full_attention", "conv"],
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            num_dense_layers=1,
            routed_scaling_factor=1.5,
        ),
        "kimi_linear": lambda: KimiLinearConfig(
            **{**deep, **KIMI},
            layer_types=["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"],
        ),
        "qwen3_5_text": lambda: Qwen3_5TextConfig(**{**shape, **DELTA_NET}),
        "qwen3_5_biases_tied": lambda: Qwen3_5TextConfig(
            **{**deep, **DELTA_NET},
            layer_types=[
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
            attention_bias=True,
            tie_word_embeddings=True,
            linear_conv_kernel_dim=3,
        ),
        "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(**{**shape, **DELTA_NET, **DELTA_EXPERTS}),
        "qwen3_next": lambda: Qwen3NextConfig(
            **{**deep, **DELTA_NET, **DELTA_EXPERTS}, decoder_sparse_step=2, mlp_only_layers=[3]
        ),
    }


def _mambas(shape: dict[str, Any], granite: dict[str, Any]) -> dict[str, Any]:
    deep = {**shape, "num_hidden_layers": 5}
    return {
        "granitemoehybrid": lambda: GraniteMoeHybridConfig(
            **{**shape, **granite, **MAMBA}, num_local_experts=4, num_experts_per_tok=2
        ),
        "granite_hybrid_dense_rope": lambda: GraniteMoeHybridConfig(
            **{**deep, **granite, **MAMBA, "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"]},
            num_local_experts=0,
            position_embedding_type="rope",
            mamba_proj_bias=True,
            mamba_conv_bias=False,
        ),
        "bamba": lambda: BambaConfig(
            **shape, mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, attn_layer_indices=[1]
        ),
        "falcon_h1": lambda: FalconH1Config(**{**shape, **FALCON_H1}),
        "falcon_h1_normed_tied": lambda: FalconH1Config(
            **{**shape, **FALCON_H1, "mamba_d_ssm": None, "mamba_n_heads": 8},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_conv_bias=False,
            tie_word_embeddings=True,
        ),
        "nemotron_h": lambda: NemotronHConfig(
            **{key: value for key, value in shape.items() if key != "num_hidden_layers"},
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "attention"],
        ),
        "nemotron_h_experts": lambda: NemotronHConfig(
            **{key: value for key, value in shape.items() if key != "num_hidden_layers"},
            head_dim=16,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=16,
            layers_block_type=["mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp"],
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=32,
            routed_scaling_factor=1.5,
        ),
    }
