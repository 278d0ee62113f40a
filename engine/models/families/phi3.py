"""Phi-3 and Phi-4 (also mini): Llama with q, k and v in one matrix of the checkpoint, gate and up in another, partial
rotary, and longrope.

transformers turns by the long factors once a sequence exceeds the context that the model was trained with, and then
recomputes its cache. Keys that are shared by prefix must not depend on who else uses them, so here all positions turn
by the long factors if and only if the engine's max_model_len exceeds that context, and by the short ones else: a model
that is never asked for more than it was trained with answers best with `--max-model-len` at its original context.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.families.common import Config, Family, decoder_spec, integer, num_layers, refuse, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def phi3_spec(config: Config) -> DecoderSpec:
    biases = ("attention_bias", "mlp_bias", "lm_head_bias")
    refuse(config, dict.fromkeys(biases, "no matrix has a bias"))
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    return decoder_spec(
        _with_longrope(with_defaults(config, rms_norm_eps=1e-5, original_max_position_embeddings=4096)),
        "phi3",
        windows=[window] * num_layers(config),
        default_rotary=1.0,
    )


def _with_longrope(config: Config) -> Config:
    """The first configs call it su or yarn."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    found = config.get(key)
    if not isinstance(found, Mapping) or (found.get("rope_type") or found.get("type")) not in ("su", "yarn"):
        return config
    return {**config, key: {**found, "rope_type": "longrope"}}


PHI3_NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
PHI3 = Family("phi3", "Phi3ForCausalLM", phi3_spec, PHI3_NAMES.rows)
