"""Hunyuan with experts (Hunyuan-A13B): in every layer, with a dense MLP beside them."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import UnsupportedModelError
from engine.models.families.common import Config, Family, integer
from engine.models.families.hunyuan import HUNYUAN_NAMES, hunyuan_spec
from engine.models.families.mixtures import experts_spec, with_experts
from engine.models.families.rows import ExpertNames
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec, RouterSpec


def hunyuan_moe_spec(config: Config) -> DecoderSpec:
    top_k = _same(config, "moe_topk")
    inner = _same({"moe_intermediate_size": config.get("intermediate_size"), **config}, "moe_intermediate_size")
    spec = hunyuan_spec(config, "hunyuan_v1_moe")
    numbers = {**config, "num_experts_per_tok": top_k, "moe_intermediate_size": inner}
    router = RouterSpec(top_k=integer(numbers, "num_experts_per_tok", 1), wide=True)
    return with_experts(spec, experts_spec(numbers, router, "num_experts"), beside=spec.facts.intermediate_size)


def _same(config: Config, key: str) -> object:
    """A number, or what a list of one for each layer says everywhere."""
    value = config.get(key)
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        return value[0]
    if isinstance(value, list):
        raise UnsupportedModelError(f"{key} {shown(value)} that differ between layers are not supported")
    return value


_EXPERTS = ExpertNames(
    router="mlp.gate.wg",
    shared=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", hunyuan_moe_spec, replace(HUNYUAN_NAMES, experts=_EXPERTS).rows
)
