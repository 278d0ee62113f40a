"""Falcon-H1: in every layer attention and Mamba 2 side by side, and numbers that what they are given and make is
multiplied with.

Most of them cost nothing here: those of embeddings, logits and keys go where such factors go in other models, queries,
keys and values are linear in what attention is given, and what attention makes is the unit of what passes between
layers (`granite.py`). The others are multiplied with what a matrix makes, because weights would round anew.
"""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
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
from engine.models.families.granite_hybrid import mamba_spec
from engine.models.families.names import Names
from engine.models.json_file import shown
from engine.models.mixers import MambaSpec
from engine.models.spec import DecoderSpec

_BIASES = ("attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias")


def falcon_h1_spec(config: Config) -> DecoderSpec:
    refuse(config, dict.fromkeys(_BIASES, "matrices of Falcon-H1 have no biases"))
    config = with_silu(with_defaults(config, max_position_embeddings=8192, rms_norm_eps=1e-5))
    given = number(config, "attention_in_multiplier", 1.0)
    spec = decoder_spec(config, "falcon_h1", windows=[None] * num_layers(config), default_kv_heads=8)
    unit = given * number(config, "attention_out_multiplier", 1.0)
    score = given**2 * number(config, "key_multiplier", 1.0)
    gate, down = _numbers(config, "mlp_multipliers", 2)
    mamba = _mamba(config, spec.hidden_size, unit)
    layers = []
    for layer in spec.layers:
        assert layer.mlp is not None
        mixer = replace(layer.attention, scale=layer.attention.scale * score)
        mlp = replace(layer.mlp, gate_scale=gate, inner_scale=down / unit)
        layers.append(replace(layer, mixer=mixer, side=mamba, mlp=mlp))
    return replace(
        spec,
        layers=tuple(layers),
        norm_eps=spec.norm_eps / unit**2,
        embedding_scale=number(config, "embedding_multiplier", 1.0) / unit,
        state_unit=unit,
        logit_scale=number(config, "lm_head_multiplier", 1.0),
    )


def with_silu(config: Config) -> Config:
    """`config`, whose activation, where it names none, is that of Mamba 2. Raises UnsupportedModelError for others."""
    named = config.get("hidden_act") or "silu"
    if named != "silu":
        raise UnsupportedModelError(f"hidden_act {shown(named)} is not supported: Mamba 2 has silu")
    return {**config, "hidden_act": named}


def _mamba(config: Config, hidden: int, unit: float) -> MambaSpec:
    normed = flag(config, "mamba_rms_norm")
    if normed and flag(config, "mamba_norm_before_gate", True):
        raise UnsupportedModelError("mamba_norm_before_gate=true is not supported: the gate comes before the norm")
    inner = integer(config, "mamba_d_ssm", 1024)
    if "mamba_d_ssm" in config and config["mamba_d_ssm"] is None:
        inner = integer(config, "mamba_expand", 2) * hidden
    given = number(config, "ssm_in_multiplier", 1.0)
    gate, values, keys, queries, amounts = (given * each for each in _numbers(config, "ssm_multipliers", 5))
    return replace(
        mamba_spec(config, inner),
        normed=normed,
        scales=(gate, values, keys, queries, amounts),
        out_scale=number(config, "ssm_out_multiplier", 1.0) / unit,
    )


def _numbers(config: Config, key: str, count: int) -> list[float]:
    found = config.get(key)
    if found is None:
        return [1.0] * count
    if not isinstance(found, list) or len(found) != count:
        raise ConfigError(f"{key} must be a list of {count} numbers, found {shown(found)}")
    return [number({key: each}, key) for each in found]


NAMES = Names(
    final_norm="model.final_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    norms=(("input_layernorm", "input_norm"), ("pre_ff_layernorm", "mlp_norm")),
)
FALCON_H1 = Family("falcon_h1", "FalconH1ForCausalLM", falcon_h1_spec, NAMES.rows)
