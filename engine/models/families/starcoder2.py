"""StarCoder2: LayerNorm, a plain MLP with GELU, biases, one window over all layers."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    decoder_spec,
    flag,
    integer,
    num_layers,
    with_defaults,
)
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def starcoder2_spec(config: Config) -> DecoderSpec:
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    bias = flag(config, "use_bias", True)
    spec = decoder_spec(
        with_defaults(config, norm_epsilon=1e-5),
        "starcoder2",
        windows=[window] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        activation=activation_of(config, "hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        default_kv_heads=2,
        epsilon="norm_epsilon",
    )
    return replace(spec, norm="layer")


STARCODER2_NAMES = Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")
STARCODER2 = Family("starcoder2", "Starcoder2ForCausalLM", starcoder2_spec, STARCODER2_NAMES.rows)
