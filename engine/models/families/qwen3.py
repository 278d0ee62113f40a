"""Qwen3 (dense): RMSNorm over each head of Q and K, a head_dim of its own, no biases unless `attention_bias`."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, flag, layer_type_windows
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def qwen3_spec(
    config: Config, family: str = "qwen3", default_head_dim: int | None = 128, default_kv_heads: int = 32
) -> DecoderSpec:
    attention_bias = flag(config, "attention_bias")
    return decoder_spec(
        config,
        family,
        windows=layer_type_windows(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm="head",
        default_head_dim=default_head_dim,
        default_kv_heads=default_kv_heads,
    )


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", qwen3_spec, LLAMA_NAMES.rows)
