"""Ministral (2024): Mistral whose layers may differ in having a window. Ministral 3: Mistral with YaRN, and queries
that grow with their position (Llama 4's attention temperature)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    decoder_spec,
    integer,
    named_windows,
    num_layers,
    optional_number,
    with_defaults,
)
from engine.models.families.mistral import SEES
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec, QueryGrowth

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral_spec(config: Config) -> DecoderSpec:
    sliding = config.get("sliding_window", 4096)
    window = None if sliding is None else integer(config, "sliding_window", 4096)
    windows = [window] * num_layers(config)
    if window is not None and config.get("layer_types") is not None:
        windows = named_windows(config, window)
    return decoder_spec(config, "ministral", windows=windows, default_kv_heads=8)


def ministral3_spec(config: Config) -> DecoderSpec:
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    defaults = with_defaults({**config, "rope_scaling": rope}, rms_norm_eps=1e-5)
    windows = [window] * num_layers(config)
    spec = decoder_spec(defaults, "ministral3", windows=windows, default_head_dim=128, default_kv_heads=8)
    assert isinstance(rope, Mapping)  # or decoder_spec had refused it
    growth = optional_number(rope, "llama_4_scaling_beta")
    if growth is None:
        return spec
    original = integer(rope, "original_max_position_embeddings", spec.ropes[0].original_max_position)
    return replace(spec, ropes=(replace(spec.ropes[0], growth=QueryGrowth(growth, original)),))


MINISTRAL = Family("ministral", "MinistralForCausalLM", ministral_spec, LLAMA_NAMES.rows)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", ministral3_spec, LLAMA_NAMES.rows, wrapper=SEES)
