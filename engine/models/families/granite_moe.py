"""Granite 3's mixtures: Granite with experts that checkpoints hold in one tensor, and with a dense MLP beside them."""

from __future__ import annotations

from engine.models.families.common import Config, Family, integer, with_defaults
from engine.models.families.granite import granite_spec
from engine.models.families.mixtures import experts_spec, from_zero, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, ExpertsSpec, RouterSpec


def granite_moe_spec(config: Config, family: str = "granitemoe", beside: int = 0) -> DecoderSpec:
    return with_experts(granite_spec(config, family), granite_experts(config), beside=beside)


def granite_experts(config: Config) -> ExpertsSpec:
    config = with_defaults(config, num_local_experts=8, num_experts_per_tok=2)
    router = RouterSpec(kind="chosen_softmax", top_k=integer(config, "num_experts_per_tok"))
    return experts_spec(config, router, "num_local_experts", "intermediate_size")


def granite_moe_shared_spec(config: Config) -> DecoderSpec:
    return granite_moe_spec(config, "granitemoeshared", from_zero(config, "shared_intermediate_size", 0))


SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    parts=("input_linear.weight", "output_linear.weight"),
    stacked=True,
    shared=SHARED,
)
_NAMES = Names(experts=EXPERTS)
_GGUF_NAMES = Names(experts=ExpertNames(router="block_sparse_moe.router.layer"))
GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", granite_moe_spec, _NAMES.rows)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    granite_moe_shared_spec,
    _NAMES.rows,
    gguf_rows=_GGUF_NAMES.rows,
)
