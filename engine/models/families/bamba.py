"""Bamba: Mamba 2, and attention that turns half of each head in some layers."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, decoder_spec, flag, integer, num_layers, with_defaults
from engine.models.families.falcon_h1 import NAMES, with_silu
from engine.models.families.granite_hybrid import mamba_spec
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec


def bamba_spec(config: Config) -> DecoderSpec:
    config = with_silu(with_defaults(config, max_position_embeddings=262144, rms_norm_eps=1e-5))
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config,
        "bamba",
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        default_kv_heads=8,
        default_rotary=0.5,
    )
    mamba = mamba_spec(config, integer(config, "mamba_expand", 2) * spec.hidden_size)
    attends = config.get("attn_layer_indices") or []
    if not isinstance(attends, list):
        raise ConfigError(f"attn_layer_indices must be a list of layers, found {shown(attends)}")
    layers = (layer if at in attends else replace(layer, mixer=mamba) for at, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


BAMBA = Family("bamba", "BambaForCausalLM", bamba_spec, NAMES.rows)
