"""Gemma 3, its text models: Gemma 2 with norms of q and k in the place of soft caps, five layers with a window for each
without, and a RoPE base of its own for either kind."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.errors import ConfigError
from engine.models.families.common import (
    Config,
    Family,
    Wrapper,
    alternating_windows,
    flag,
    integer,
    optional_number,
    refuse,
    with_defaults,
)
from engine.models.families.gemma2 import GEMMA_NAMES, gemma_spec
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec


def gemma3_spec(config: Config) -> DecoderSpec:
    """EmbeddingGemma is one whose attention looks both ways: `sliding_window` counts both sides of a window."""
    if not flag(config, "use_bidirectional_attention"):
        return _causal_spec(config)
    config = {**config, "use_bidirectional_attention": False}
    if config.get("sliding_window", 4096) is not None:
        config["sliding_window"] = integer(config, "sliding_window", 4096) // 2
    return msgspec.structs.replace(_causal_spec(config), causal=False)


def _causal_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, **_DEFAULTS)
    refuse(config, {"attn_logit_softcapping": "Gemma 3 has no cap on attention scores"})
    windows = alternating_windows(config, 4096, period=integer(config, "sliding_window_pattern", 6))
    full, local = rope_parameters_of(config)
    everywhere = {**config, "rope_scaling": None}
    spec = gemma_spec(
        {**everywhere, "rope_parameters": full},
        "gemma3_text",
        windows,
        qk_norm="head",
        local_rope={**everywhere, "rope_parameters": local},
    )
    return msgspec.structs.replace(spec, logit_cap=optional_number(config, "final_logit_softcapping"))


def rope_parameters_of(config: Config) -> tuple[Config, Config]:
    """Of layers that see all and of those with a window: under the layer types' names (transformers 5), or as
    `rope_theta` with `rope_scaling`, and `rope_local_base_freq` (before)."""
    named = config.get("rope_parameters") or {}
    if not isinstance(named, Mapping):
        raise ConfigError(f"rope_parameters must be an object, found {shown(named)}")
    scaling = config.get("rope_scaling") or named.get("full_attention") or {}
    local = named.get("sliding_attention") or {}
    if not isinstance(scaling, Mapping) or not isinstance(local, Mapping):
        raise ConfigError("rope_parameters must hold an object for each layer type")
    return (
        {"rope_theta": config.get("rope_theta") or 1_000_000.0, **scaling},
        {"rope_theta": config.get("rope_local_base_freq") or 10_000.0, **local},
    )


_DEFAULTS = {"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6}
"""that configs of models that see leave out"""
_SEES = Wrapper("Gemma3ForConditionalGeneration", others=("vision_tower.", "multi_modal_projector."))
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", gemma3_spec, GEMMA_NAMES.rows, wrapper=_SEES)
