"""Gemma 4, its text models: Gemma 3 with larger heads in layers that see all, values that are normed (there perhaps
keys), last layers that read others' keys, inputs of each layer's own, and experts beside the dense MLP."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    Wrapper,
    activation_of,
    decoder_spec,
    flag,
    integer,
    optional_number,
    with_defaults,
)
from engine.models.families.gemma3 import rope_parameters_of
from engine.models.families.gemma4_layers import ROPES, attention_windows, keepers, layer_inputs, wide_heads
from engine.models.families.mixtures import experts_spec, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, MlpSpec, RouterSpec


def gemma4_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, rope_parameters=ROPES, hidden_activation="gelu_pytorch_tanh")
    config = {**config, "hidden_act": config["hidden_activation"]}
    windows, bias = attention_windows(config), flag(config, "attention_bias")
    everywhere, local = rope_parameters_of(config)
    spec = decoder_spec(
        {**config, "rope_parameters": local},
        "gemma4_text",
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        scale=1.0,
        tied=True,
        default_head_dim=256,
        default_kv_heads=4,
    )
    if flag(config, "enable_moe_block"):
        router = RouterSpec(top_k=integer(config, "top_k_experts"), expert_scales=True)
        experts = replace(experts_spec(config, router, "num_experts"), apart=True)
        spec = with_experts(spec, experts, beside=integer(config, "intermediate_size"))
    wide, wide_rope = wide_heads(config, everywhere, windows)
    inner = integer(config, "intermediate_size") * (2 if flag(config, "use_double_wide_mlp") else 1)
    widened = MlpSpec(intermediate_size=inner, activation=activation_of(config, "hidden_act", "gelu_pytorch_tanh"))
    layers = []
    for layer, window, keeper in zip(spec.layers, windows, keepers(config, windows), strict=True):
        mixer = replace(layer.mixer, **(wide if window is None else {"values": "normed"}))
        if keeper is not None:
            mixer = replace(mixer, values="own", shares=keeper)
        mlp = layer.mlp if keeper is None else widened
        layers.append(replace(layer, mixer=mixer, mlp=mlp))
    return replace(
        spec,
        layers=tuple(layers),
        ropes=(*spec.ropes, wide_rope),
        norm="rms_wide",
        norm_placement="around",
        embedding_scale=spec.hidden_size**0.5,
        round_embedding_scale=True,
        layer_inputs=layer_inputs(config),
        layer_scales=True,
        logit_cap=optional_number(config, "final_logit_softcapping"),
    )


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PARTS = ("gate_up_proj", "down_proj")
_NAMES = Names(experts=ExpertNames(router="router.proj", experts="experts", parts=_PARTS, stacked=True, shared=_MLP))
_OTHERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
_WRAPPER = Wrapper("Gemma4ForConditionalGeneration", "model.language_model.", replaces="model.", others=_OTHERS)
GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", gemma4_spec, _NAMES.rows, wrapper=_WRAPPER)
