"""GPT-NeoX, Pythia: attention and MLP side by side, each behind a LayerNorm of its own; a quarter of each head turns;
the checkpoint's one matrix makes q, k and v of one head after the other."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, activation_of, decoder_spec, flag, num_layers, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def gpt_neox_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", True)
    legacy = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    named = {key: value for key, value in legacy.items() if value is not None}
    only_heads = {**config, **named, "num_key_value_heads": None, "head_dim": None}
    spec = decoder_spec(
        with_defaults(only_heads, layer_norm_eps=1e-5),
        "gpt_neox",
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated=False,
        activation=activation_of(config, "hidden_act", "gelu"),
        default_rotary=0.25,
        epsilon="layer_norm_eps",
    )
    return replace(spec, norm="layer", parallel="two_norms" if flag(config, "use_parallel_residual", True) else None)


GPT_NEOX_NAMES = Names(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    qkv_stored="heads of qkv",
)
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    gpt_neox_spec,
    GPT_NEOX_NAMES.rows,
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias"),
)
