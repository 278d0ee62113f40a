"""SmolLM3: Llama in which every fourth layer turns neither queries nor keys."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.models.families.common import (
    Config,
    Family,
    decoder_spec,
    flag,
    integer,
    named_windows,
    num_layers,
    with_defaults,
)
from engine.models.families.names import LLAMA_NAMES
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec


def smollm3_spec(config: Config) -> DecoderSpec:
    bias, turned = flag(config, "attention_bias"), _turned(config)
    return decoder_spec(
        with_defaults(config, rope_theta=2e6),
        "smollm3",
        windows=_windows(config, turned),
        turned=turned,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        tied=True,
        default_kv_heads=4,
    )


def _turned(config: Config) -> list[bool]:
    """`no_rope_layers` is 1 for layers that do turn."""
    listed, count = config.get("no_rope_layers"), num_layers(config)
    if listed is None:
        interval = integer(config, "no_rope_layer_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(turns not in (0, 1) for turns in listed):
        raise ConfigError(f"no_rope_layers must hold 0 or 1 for each of the {count} layers, found {shown(listed)}")
    return [bool(turns) for turns in listed[:count]]


def _windows(config: Config, turned: list[bool]) -> list[int | None]:
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return [None] * num_layers(config)
    window = integer(config, "sliding_window")
    if config.get("layer_types") is None:
        return [None if turns else window for turns in turned]
    return named_windows(config, window)


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", smollm3_spec, LLAMA_NAMES.rows)
