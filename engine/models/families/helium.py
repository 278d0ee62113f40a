"""Helium: Llama whose heads turn in neighbouring pairs, and whose norms round once."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def helium_spec(config: Config) -> DecoderSpec:
    spec = decoder_spec(
        with_defaults(config, rope_theta=1e5, rms_norm_eps=1e-8),
        "helium",
        windows=[None] * num_layers(config),
        qkv_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        default_head_dim=128,
        default_kv_heads=20,
    )
    width = spec.layers[0].attention.q_size
    if width != spec.hidden_size:
        raise ConfigError(f"heads are {width} wide together, hidden_size is {spec.hidden_size}")
    return replace(spec, norm="rms_wide")


HELIUM = Family("helium", "HeliumForCausalLM", helium_spec, Names(qkv_stored="pairs").rows)
