"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def seed_oss_spec(config: Config) -> DecoderSpec:
    return decoder_spec(
        config,
        "seed_oss",
        windows=[None] * num_layers(config),
        qkv_bias=flag(config, "attention_bias", True),
        o_bias=flag(config, "attention_out_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        default_head_dim=128,
        default_kv_heads=8,
    )


SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", seed_oss_spec, LLAMA_NAMES.rows)
