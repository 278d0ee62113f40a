"""Qwen3.5 (its text model): gated delta nets, and attention with a gate in every fourth layer."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, Wrapper, decoder_spec, flag, integer, num_layers
from engine.models.families.names import Names
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec, DeltaSpec, MixerSpec

_NAMES = Names(norms_stored="less one")


def qwen3_5_spec(config: Config, family: str = "qwen3_5_text") -> DecoderSpec:
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config,
        family,
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        default_head_dim=256,
        default_kv_heads=4,
        default_rotary=0.25,
    )
    delta = DeltaSpec(
        key_heads=integer(config, "linear_num_key_heads", 16),
        value_heads=integer(config, "linear_num_value_heads", 32),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        taps=integer(config, "linear_conv_kernel_dim", 4),
    )
    if delta.value_heads % delta.key_heads:
        raise ConfigError(
            f"linear_num_value_heads ({delta.value_heads}) is not a multiple of linear_num_key_heads "
            f"({delta.key_heads})"
        )
    layers = []
    for layer, attends in zip(spec.layers, _kinds(config), strict=True):
        assert isinstance(layer.mixer, MixerSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, gated=True) if attends else delta))
    return replace(spec, layers=tuple(layers))


def _kinds(config: Config) -> list[bool]:
    """Of each layer, whether it attends."""
    count, named = num_layers(config), config.get("layer_types")
    if named is None:
        interval = integer(config, "full_attention_interval", 4)
        return [(index + 1) % interval == 0 for index in range(count)]
    if not isinstance(named, list) or len(named) != count or not {*named} <= {"full_attention", "linear_attention"}:
        raise ConfigError(f"layer_types must name full_attention or linear_attention {count} times: {shown(named)}")
    return [kind == "full_attention" for kind in named]


QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    qwen3_5_spec,
    _NAMES.rows,
    wrapper=Wrapper(
        "Qwen3_5ForConditionalGeneration",
        prefix="model.language_model.",
        replaces="model.",
        others=("model.visual.", "mtp."),
    ),
)
