"""Mistral 4: DeepSeek-V3's layers with a softmax over experts, and queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, flag, integer, number, optional_number, with_defaults
from engine.models.families.latents import latent_spec
from engine.models.families.mistral import SEES
from engine.models.families.mixtures import first_dense, with_deepseek_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec, QueryGrowth, RouterSpec

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4_spec(config: Config) -> DecoderSpec:
    given = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters must be an object, found {shown(given)}")
    rope = {key: value for key, value in given.items() if key != "partial_rotary_factor"}  # says qk_rope_head_dim again
    sizes = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = with_defaults({"q_lora_rank": 1024, **config, "rope_scaling": None, "rope_parameters": rope}, **sizes)
    spec = latent_spec(with_defaults(config, max_position_embeddings=2**20), "mistral4")
    growth = optional_number(rope, "llama_4_scaling_beta")
    if growth is not None:
        original = integer(rope, "original_max_position_embeddings", spec.ropes[0].original_max_position)
        spec = replace(spec, ropes=(replace(spec.ropes[0], growth=QueryGrowth(growth, original)),))
    experts = {"n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 4}
    config = with_defaults(config, **experts)
    router = RouterSpec(
        top_k=integer(config, "num_experts_per_tok"),
        normalise=flag(config, "norm_topk_prob", True),
        groups=integer(config, "n_group", 1),
        top_groups=integer(config, "topk_group", 1),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    return with_deepseek_experts(spec, config, router, first_dense(config, 0))


_NAMES = Names(experts=ExpertNames(parts=("gate_up_proj", "down_proj"), stacked=True))
MISTRAL4 = Family("mistral4", "Mistral4ForCausalLM", mistral4_spec, _NAMES.rows, wrapper=SEES)
