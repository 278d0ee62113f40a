"""Hunyuan (dense): Llama with norms over each head of q and k when they have been turned, and a rope whose base is
stretched by a fixed `alpha` (called dynamic, though nothing about it is)."""

from __future__ import annotations

from collections.abc import Mapping

from engine.errors import ConfigError
from engine.models.families.common import (
    Config,
    Family,
    decoder_spec,
    flag,
    integer,
    num_layers,
    number,
    refuse,
    with_defaults,
)
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def hunyuan_spec(config: Config, family: str = "hunyuan_v1_dense") -> DecoderSpec:
    refuse(config, {"use_cla": "every layer has keys and values of its own", "mlp_bias": "MLPs have no biases"})
    bias = flag(config, "attention_bias")
    return decoder_spec(
        _with_fixed_base(with_defaults(config, rms_norm_eps=1e-5)),
        family,
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="turned_head",
    )


def _with_fixed_base(config: Config) -> Config:
    found = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(found, Mapping) or not found.get("alpha"):
        return config
    if (found.get("rope_type") or found.get("type")) != "dynamic":
        return config
    width = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    if width <= 2:
        raise ConfigError(f"head_dim {width} is too small for a stretched base")
    theta = number(found, "rope_theta", number(config, "rope_theta", 10000.0))
    base = theta * number(found, "alpha") ** (width / (width - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": base}}


HUNYUAN_NAMES = Names(qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))
HUNYUAN = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", hunyuan_spec, HUNYUAN_NAMES.rows)
