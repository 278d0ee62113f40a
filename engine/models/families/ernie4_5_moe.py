"""ERNIE 4.5 with experts: chosen by corrected softmax, some layers dense, and a dense MLP beside them."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.models.families.common import Config, Family, integer, number, with_defaults
from engine.models.families.ernie4_5 import ernie4_5_spec
from engine.models.families.mixtures import experts_spec, from_zero, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, RouterSpec

_LEAST_NORM = 1e-9
"""that no sum of scores falls below, in a model that is of use"""


def ernie4_5_moe_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, num_key_value_heads=4)
    if (least := number(config, "moe_norm_min", 1e-12)) > _LEAST_NORM:
        raise UnsupportedModelError(f"moe_norm_min {least:g} is not supported: factors are divided by their whole sum")
    spec = ernie4_5_spec(config, "ernie4_5_moe", None)
    router = RouterSpec(top_k=integer(config, "moe_k"), correction=True, wide=True)
    experts = experts_spec(config, router, "moe_num_experts")
    every, first = integer(config, "moe_layer_interval", 1), from_zero(config, "moe_layer_start_index", 1)
    named = config.get("moe_layer_end_index")
    last = spec.num_layers - 1 if named in (None, -1) else from_zero(config, "moe_layer_end_index", 0)
    sparse = [(layer + 1) % every == 0 and first <= layer <= last for layer in range(spec.num_layers)]
    beside = experts.inner_size * from_zero(config, "moe_num_shared_experts", 2)
    return with_experts(spec, experts, sparse, beside)


_EXPERTS = ExpertNames(correction="mlp.moe_statics.e_score_correction_bias", correction_stored="among ones")
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    ernie4_5_moe_spec,
    Names(qkv_stored="pairs", experts=_EXPERTS).rows,
    predicts_more=True,
)
