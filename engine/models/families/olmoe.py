"""OLMoE: experts in every layer, and norms over the whole width of q and k."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, flag, integer, num_layers, refuse, with_defaults
from engine.models.families.mixtures import experts_spec, with_experts
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec, RouterSpec


def olmoe_spec(config: Config) -> DecoderSpec:
    refuse(config, {"clip_qkv": "q, k and v are not clipped"})
    config = with_defaults(config, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8)
    bias = flag(config, "attention_bias")
    windows: list[int | None] = [None] * num_layers(config)
    spec = decoder_spec(config, "olmoe", windows=windows, qkv_bias=bias, o_bias=bias, qk_norm="row")
    router = RouterSpec(top_k=integer(config, "num_experts_per_tok"), normalise=flag(config, "norm_topk_prob"))
    return with_experts(spec, experts_spec(config, router, "num_experts", "intermediate_size"))


OLMOE = Family("olmoe", "OlmoeForCausalLM", olmoe_spec, LLAMA_NAMES.rows)
