"""Phi-1, 1.5 and 2: attention and MLP side by side behind one LayerNorm, biases (the unembedding's too), partial
rotary."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, activation_of, decoder_spec, num_layers, refuse, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def phi_spec(config: Config) -> DecoderSpec:
    refuse(config, {"qk_layernorm": "there are no norms of q and k"})
    spec = decoder_spec(
        with_defaults(config, layer_norm_eps=1e-5),
        "phi",
        windows=[None] * num_layers(config),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        activation=activation_of(config, "hidden_act", "gelu_new"),
        default_rotary=0.5,
        epsilon="layer_norm_eps",
    )
    return replace(spec, norm="layer", parallel="one_norm", head_bias=not spec.tie_embeddings)


PHI_NAMES = Names(
    final_norm="model.final_layernorm",
    o="self_attn.dense",
    gate_up=("mlp.fc1",),
    down="mlp.fc2",
    norms=(("input_layernorm", "input_norm"),),
)
PHI = Family("phi", "PhiForCausalLM", phi_spec, PHI_NAMES.rows)
