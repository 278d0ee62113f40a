"""Llama 4's text model: experts fed rows times a factor, attention in chunks, and layers that turn nothing but grow."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    Wrapper,
    chunks_of,
    decoder_spec,
    flag,
    integer,
    number,
    turned_layers,
    with_defaults,
)
from engine.models.families.mixtures import experts_spec, listed_layers, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, QueryGrowth, RopeSpec, RouterSpec


def llama4_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, rms_norm_eps=1e-5, rope_theta=5e5, num_local_experts=16, num_experts_per_tok=1)
    bias, turned = flag(config, "attention_bias"), turned_layers(config)
    spec = decoder_spec(
        {**config, "intermediate_size": integer(config, "intermediate_size_mlp", 16384)},
        "llama4_text",
        windows=[None] * len(turned),
        turned=turned,
        qkv_bias=bias,
        o_bias=bias,
        default_head_dim=128,
        default_kv_heads=8,
    )
    growth = QueryGrowth(number(config, "attn_scale", 0.1), integer(config, "floor_scale", 8192), ahead=1)
    grows = bool(config.get("attn_temperature_tuning", True))  # the first configs said 4 for true
    norm = "turned_head" if flag(config, "use_qk_norm", True) else None
    layers = []
    for layer, turns, chunk in zip(spec.layers, turned, chunks_of(config, turned), strict=True):
        rules = {"qk_norm": norm, "qk_weights": False} if turns else {"rope": 1 if grows else None}
        layers.append(replace(layer, mixer=replace(layer.mixer, chunk=chunk, **rules)))
    ropes = (*spec.ropes, RopeSpec(rotary_dim=0, growth=growth)) if grows else spec.ropes
    spec, sparse = replace(spec, layers=tuple(layers), ropes=ropes), listed_layers(config)
    if not any(sparse):
        return spec
    router = RouterSpec(kind="sigmoid", top_k=integer(config, "num_experts_per_tok"), normalise=False, of_inputs=True)
    experts = experts_spec(config, router, "num_local_experts", "intermediate_size")
    return with_experts(spec, experts, sparse, beside=experts.inner_size)


_MLP = ("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")
_SHARED = tuple(name.replace(".", ".shared_expert.") for name in _MLP)
_EXPERTS = ExpertNames(router="feed_forward.router", experts="feed_forward.experts", shared=_SHARED)
_GGUF = Names(gate_up=_MLP[:2], down=_MLP[2], qkv_stored="pairs", experts=_EXPERTS)
_STACKED = replace(_EXPERTS, parts=("gate_up_proj", "down_proj"), stacked=True, transposed=True)
_NAMES, _WRAPPER = replace(_GGUF, experts=_STACKED), Wrapper("Llama4ForConditionalGeneration")
LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", llama4_spec, _NAMES.rows, gguf_rows=_GGUF.rows, wrapper=_WRAPPER)
