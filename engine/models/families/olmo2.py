"""OLMo 2 and OLMo 3: norms behind attention and MLP only, within the residual, and over the whole width of q and k.
OLMo 3 has a window on three of four layers, and stretches the others' rope alone."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import (
    Config,
    Family,
    alternating_windows,
    decoder_spec,
    flag,
    num_layers,
    with_defaults,
)
from engine.models.families.names import LLAMA_NAMES
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec


def olmo2_spec(config: Config) -> DecoderSpec:
    return _spec(config, "olmo2", [None] * num_layers(config))


def olmo3_spec(config: Config) -> DecoderSpec:
    named = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    if not isinstance(named, Mapping) or not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_parameters must be an object, found {shown(named or scaling)}")
    full, local = named.get("full_attention") or {}, named.get("sliding_attention") or {}
    if not isinstance(full, Mapping) or not isinstance(local, Mapping):
        raise ConfigError("rope_parameters must hold an object for each layer type")
    everywhere = with_defaults({**config, "rope_scaling": None}, rope_theta=5e5)
    ropes = [{**everywhere, "rope_parameters": own} for own in ({**full, **scaling}, local)]
    return _spec(ropes[0], "olmo3", alternating_windows(config, 4096, period=4), ropes[1])


def _spec(config: Config, family: str, windows: list[int | None], local_rope: Config | None = None) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        with_defaults(config, rms_norm_eps=1e-5),
        family,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        local_rope=local_rope,
    )
    return replace(spec, norm="rms_wide", norm_placement="inside")


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", olmo2_spec, LLAMA_NAMES.rows)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", olmo3_spec, LLAMA_NAMES.rows)
