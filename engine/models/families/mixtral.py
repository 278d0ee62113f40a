"""Mixtral: Mistral with experts in the place of MLPs."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, integer, num_layers, with_defaults
from engine.models.families.mixtures import experts_spec, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, RouterSpec


def mixtral_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, rope_theta=1e6, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2)
    window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
    spec = decoder_spec(config, "mixtral", windows=[window] * num_layers(config), default_kv_heads=8)
    router = RouterSpec(top_k=integer(config, "num_experts_per_tok"))
    return with_experts(spec, experts_spec(config, router, "num_local_experts", "intermediate_size"))


MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    parts=("w1", "w3", "w2"),
)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", mixtral_spec, Names(experts=MIXTRAL_EXPERTS).rows)
