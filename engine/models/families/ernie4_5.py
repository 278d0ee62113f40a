"""ERNIE 4.5 (dense): Llama whose heads turn in neighbouring pairs; biases everywhere or nowhere."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def ernie4_5_spec(config: Config, family: str = "ernie4_5", default_head_dim: int | None = 128) -> DecoderSpec:
    bias = flag(config, "use_bias")
    return decoder_spec(
        with_defaults(config, rope_theta=5e5, rms_norm_eps=1e-5),
        family,
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=True,
        default_head_dim=default_head_dim,
        default_kv_heads=2,
    )


ERNIE4_5 = Family("ernie4_5", "Ernie4_5ForCausalLM", ernie4_5_spec, Names(qkv_stored="pairs").rows)
