"""Nemotron 3 and 4, Minitron: LayerNorm times 1 + weight, a plain MLP with squared ReLU, partial rotary."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, activation_of, decoder_spec, flag, num_layers, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def nemotron_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        with_defaults(config, norm_eps=1e-5),
        "nemotron",
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        gated=False,
        activation=activation_of(config, "hidden_act", "relu2"),
        default_rotary=0.5,
        epsilon="norm_eps",
    )
    return replace(spec, norm="layer")


NEMOTRON_NAMES = Names(gate_up=("mlp.up_proj",), norms_stored="less one")
NEMOTRON = Family("nemotron", "NemotronForCausalLM", nemotron_spec, NEMOTRON_NAMES.rows)
