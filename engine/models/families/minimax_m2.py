"""MiniMax-M2: experts chosen by corrected sigmoids, norms over the whole width of q and k, heads that turn in part."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, integer, num_layers, with_defaults
from engine.models.families.mixtral import MIXTRAL_EXPERTS
from engine.models.families.mixtures import experts_spec, with_experts
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec, RouterSpec


def minimax_m2_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, rope_theta=5e6, num_local_experts=256, num_experts_per_tok=8)
    if config.get("rotary_dim") is not None:
        share = integer(config, "rotary_dim") / integer(config, "head_dim", 128)
        config = with_defaults(config, partial_rotary_factor=share)
    spec = decoder_spec(
        config,
        "minimax_m2",
        windows=[None] * num_layers(config),
        qk_norm="row",
        default_rotary=1.0,
        default_head_dim=128,
        default_kv_heads=8,
    )
    router = RouterSpec(kind="sigmoid", top_k=integer(config, "num_experts_per_tok"), correction=True)
    return with_experts(spec, experts_spec(config, router, "num_local_experts", "intermediate_size"))


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    minimax_m2_spec,
    Names(experts=MIXTRAL_EXPERTS).rows,
    predicts_more=True,
)
