"""Mistral: Llama with one sliding window over all layers (4096 tokens unless the config says otherwise)."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.models.families.common import Config, Family, Wrapper, decoder_spec, integer, num_layers
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def mistral_spec(config: Config) -> DecoderSpec:
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and len({str(kind) for kind in layer_types}) > 1:
        raise UnsupportedModelError("mistral configs with alternating layer_types (Ministral) are not supported")
    sliding = config.get("sliding_window", 4096)
    window = None if sliding is None else integer(config, "sliding_window", 4096)
    return decoder_spec(config, "mistral", windows=[window] * num_layers(config), default_kv_heads=8)


SEES = Wrapper("Mistral3ForConditionalGeneration", others=("vision_tower.", "multi_modal_projector."))
MISTRAL = Family("mistral", "MistralForCausalLM", mistral_spec, LLAMA_NAMES.rows, wrapper=SEES)
