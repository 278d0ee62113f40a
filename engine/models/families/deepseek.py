"""DeepSeek V2 and V3: latent attention, and experts behind the first layers. V3 is R1, too, and Kimi K2's model."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.models.families.common import Config, Family, integer, number, with_defaults
from engine.models.families.latents import latent_spec
from engine.models.families.mixtures import first_dense, sigmoid_router, with_deepseek_experts
from engine.models.families.mtp import MtpNames
from engine.models.families.names import LLAMA_NAMES
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec, RouterSpec


def deepseek_v2_spec(config: Config) -> DecoderSpec:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = with_defaults({"q_lora_rank": 1536, **config}, **sizes, max_position_embeddings=2048)
    experts = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    spec = latent_spec(config, "deepseek_v2")
    return with_deepseek_experts(spec, with_defaults(config, **experts), _router(config), first_dense(config, 0))


def _router(config: Config) -> RouterSpec:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"topk_method {shown(method)} is not supported; supported are greedy, group_limited_greedy"
        )
    in_groups = method == "group_limited_greedy"
    return RouterSpec(
        top_k=integer(config, "num_experts_per_tok"),
        normalise=False,
        groups=integer(config, "n_group", 1) if in_groups else 1,
        top_groups=integer(config, "topk_group", 1) if in_groups else 1,
        by_best=in_groups,
        scale=number(config, "routed_scaling_factor", 1.0),
        wide=True,
    )


def deepseek_v3_spec(config: Config) -> DecoderSpec:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = with_defaults({"q_lora_rank": 1536, **config}, **sizes, max_position_embeddings=4096)
    experts = {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8}
    groups = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    spec = latent_spec(config, "deepseek_v3")
    config = with_defaults(config, **experts, **groups)
    return with_deepseek_experts(spec, config, sigmoid_router(config), first_dense(config, 3))


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", deepseek_v2_spec, LLAMA_NAMES.rows)
_MTP = MtpNames(
    count="num_nextn_predict_layers",
    layer="model.layers.{}",
    fc="model.layers.{}.eh_proj",
    next_norm="model.layers.{}.enorm",
    hidden_norm="model.layers.{}.hnorm",
    final_norm="model.layers.{}.shared_head.norm",
    names=(LLAMA_NAMES,),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", deepseek_v3_spec, LLAMA_NAMES.rows, predicts_more=True, mtp=_MTP
)
