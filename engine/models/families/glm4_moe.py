"""GLM-4.5 to 4.7 and dots.llm1: Llama with DeepSeek-V3's experts behind the first layers. GLM's heads turn in part, and
its checkpoints hold a head that predicts a second token, which is left out."""

from __future__ import annotations

from engine.models.families.common import (
    Config,
    Family,
    decoder_spec,
    flag,
    integer,
    named_windows,
    num_layers,
    with_defaults,
)
from engine.models.families.mixtures import first_dense, from_zero, sigmoid_router, with_deepseek_experts
from engine.models.families.names import LLAMA_NAMES
from engine.models.mixers import QkNorm
from engine.models.spec import DecoderSpec


def glm4_moe_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, rms_norm_eps=1e-5, n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1)
    norm: QkNorm | None = "head" if flag(config, "use_qk_norm") else None
    windows: list[int | None] = [None] * num_layers(config)
    spec = decoder_spec(
        with_defaults(config, moe_intermediate_size=1408),
        "glm4_moe",
        windows=windows,
        qkv_bias=flag(config, "attention_bias"),
        qk_norm=norm,
        default_rotary=0.5,
        default_kv_heads=8,
    )
    config = with_defaults(config, moe_intermediate_size=1408)
    return with_deepseek_experts(spec, config, sigmoid_router(config), first_dense(config, 1))


def dots1_spec(config: Config) -> DecoderSpec:
    window, full_layers = config.get("sliding_window", 4096), from_zero(config, "max_window_layers", 62)
    windows: list[int | None] = [None] * num_layers(config)
    if window is not None and config.get("layer_types") is not None:
        windows = named_windows(config, integer(config, "sliding_window", 4096))
    elif window is not None:
        beyond = integer(config, "sliding_window", 4096)
        windows = [beyond if layer >= full_layers else None for layer in range(num_layers(config))]
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config, "dots1", windows=windows, qkv_bias=bias, o_bias=bias, qk_norm="head", default_kv_heads=32
    )
    router = sigmoid_router(with_defaults(config, norm_topk_prob=False))
    return with_deepseek_experts(spec, config, router, first_dense(config, 0))


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", glm4_moe_spec, LLAMA_NAMES.rows, predicts_more=True)
DOTS1 = Family("dots1", "Dots1ForCausalLM", dots1_spec, LLAMA_NAMES.rows)
