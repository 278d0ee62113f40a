"""Apertus: norms over each head of q and k, a plain MLP with xIELU."""

from __future__ import annotations

from typing import Literal

from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    decoder_spec,
    flag,
    num_layers,
    refuse,
    with_defaults,
)
from engine.models.families.names import Names
from engine.models.spec import Activation, DecoderSpec

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus_spec(config: Config) -> DecoderSpec:
    refuse(config, {"post_norm": "norms stand before attention and MLP", "mlp_bias": "MLPs have no biases"})
    bias = flag(config, "attention_bias")
    activation: Activation | Literal["xielu"] = "xielu"
    if config.get("hidden_act") not in (None, "xielu"):
        activation = activation_of(config, "hidden_act", "xielu")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    return decoder_spec(
        with_defaults({**config, "rope_scaling": rope}, rope_theta=12_000_000.0, rms_norm_eps=1e-5),
        "apertus",
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        activation=activation,
        qk_norm="head",
    )


APERTUS_NAMES = Names(
    gate_up=("mlp.up_proj",),
    norms=(("attention_layernorm", "input_norm"), ("feedforward_layernorm", "mlp_norm")),
)
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    apertus_spec,
    APERTUS_NAMES.rows,
    ignored=(".mlp.act_fn.beta", ".mlp.act_fn.eps"),  # constants of xIELU, 0.5 and -1e-6
)
