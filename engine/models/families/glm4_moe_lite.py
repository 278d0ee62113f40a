"""GLM-4.7-Flash: DeepSeek-V3 whose layers each say whether they have experts."""

from __future__ import annotations

from engine.models.families.common import Config, Family, with_defaults
from engine.models.families.latents import latent_spec
from engine.models.families.mixtures import named_sparse, sigmoid_router, with_deepseek_experts
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def glm4_moe_lite_spec(config: Config) -> DecoderSpec:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    config = with_defaults({"q_lora_rank": 768, **config}, **sizes, rms_norm_eps=1e-5, max_position_embeddings=202752)
    experts = {"n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4}
    spec = latent_spec(config, "glm4_moe_lite")
    config = with_defaults(config, **experts, routed_scaling_factor=1.8)
    return with_deepseek_experts(spec, config, sigmoid_router(config), named_sparse(config, 1))


GLM4_MOE_LITE = Family(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM", glm4_moe_lite_spec, LLAMA_NAMES.rows, predicts_more=True
)
