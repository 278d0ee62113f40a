"""SmolLM3: Llama in which every fourth layer turns neither queries nor keys."""

from __future__ import annotations

from engine.models.families.common import (
    Config,
    Family,
    decoder_spec,
    flag,
    integer,
    named_windows,
    num_layers,
    turned_layers,
    with_defaults,
)
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def smollm3_spec(config: Config) -> DecoderSpec:
    bias, turned = flag(config, "attention_bias"), turned_layers(config)
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


def _windows(config: Config, turned: list[bool]) -> list[int | None]:
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return [None] * num_layers(config)
    window = integer(config, "sliding_window")
    if config.get("layer_types") is None:
        return [None if turns else window for turns in turned]
    return named_windows(config, window)


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", smollm3_spec, LLAMA_NAMES.rows)
