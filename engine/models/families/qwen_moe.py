"""Qwen2-MoE and Qwen3-MoE: their dense elders with experts in most layers; Qwen2's has a dense MLP beside them, with a
sigmoid of its own."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, decoder_spec, flag, integer, num_layers, refuse, with_defaults
from engine.models.families.mixtures import experts_spec, sparse_layers, with_experts
from engine.models.families.names import LLAMA_NAMES, Names
from engine.models.families.qwen3 import qwen3_spec
from engine.models.families.rows import ExpertNames
from engine.models.spec import DecoderSpec, ExpertsSpec, RouterSpec


def _experts(config: Config) -> ExpertsSpec:
    router = RouterSpec(top_k=integer(config, "num_experts_per_tok"), normalise=flag(config, "norm_topk_prob"))
    return experts_spec(config, router, "num_experts")


def qwen2_moe_spec(config: Config) -> DecoderSpec:
    refuse(config, {"use_sliding_window": "its layers see everything"})
    config = with_defaults(config, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    spec = decoder_spec(
        config,
        "qwen2_moe",
        windows=[None] * num_layers(config),
        qkv_bias=flag(config, "qkv_bias", True),
        default_kv_heads=16,
    )
    beside = integer(config, "shared_expert_intermediate_size", 5632)
    experts = replace(_experts(config), gated_beside=True)
    return with_experts(spec, experts, sparse_layers(config), beside)


def qwen3_moe_spec(config: Config) -> DecoderSpec:
    written_by_transformers_5 = config.get("num_local_experts") or 128
    config = with_defaults(
        config, num_experts=written_by_transformers_5, num_experts_per_tok=8, moe_intermediate_size=768
    )
    sliding = flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None
    window = integer(config, "sliding_window", 4096) if sliding else None
    dense = qwen3_spec({**config, "use_sliding_window": False}, "qwen3_moe", None, 4)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, window=window)) for layer in dense.layers)
    return with_experts(replace(dense, layers=layers), _experts(config), sparse_layers(config))


SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe_spec, Names(experts=ExpertNames(shared=SHARED)).rows)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe_spec, LLAMA_NAMES.rows)
