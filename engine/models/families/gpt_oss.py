"""GPT-OSS: experts with biases and a clamped gate, sinks, a window on every other layer, YaRN."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    alternating_windows,
    decoder_spec,
    flag,
    integer,
    number,
    with_defaults,
)
from engine.models.families.mixtures import with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.spec import ClampedSwiGLU, DecoderSpec, ExpertsSpec, RouterSpec

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_spec(config: Config) -> DecoderSpec:
    bias = flag(config, "attention_bias", True)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    spec = decoder_spec(
        {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, **config, "rope_scaling": rope},
        "gpt_oss",
        windows=alternating_windows(config, 128, period=2),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        default_head_dim=64,
        default_kv_heads=8,
    )
    config = with_defaults(config, num_local_experts=128, num_experts_per_tok=4)
    experts = ExpertsSpec(
        count=integer(config, "num_local_experts"),
        inner_size=integer(config, "intermediate_size"),
        router=RouterSpec(kind="chosen_softmax", top_k=integer(config, "num_experts_per_tok"), bias=True),
        activation=ClampedSwiGLU(number(config, "swiglu_limit", 7.0), number(config, "swiglu_alpha", 1.702)),
        bias=True,
    )
    return with_experts(replace(spec, norm="rms_wide"), experts)


_EXPERTS = ExpertNames(
    router="mlp.router", parts=("gate_up_proj", "down_proj"), stacked=True, transposed=True, turns="in turns"
)
_GGUF_NAMES = Names(experts=ExpertNames(router="mlp.router"))
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", gpt_oss_spec, Names(experts=_EXPERTS).rows, gguf_rows=_GGUF_NAMES.rows)
