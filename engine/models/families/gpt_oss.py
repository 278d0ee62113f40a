"""GPT-OSS, its attention: sinks, a window on every other layer, YaRN, biases. Its mixture of experts is not there yet,
so a whole model is refused."""

from __future__ import annotations

from engine.errors import UnsupportedModelError
from engine.models.families.common import Config, Family, alternating_windows, decoder_spec, flag
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_attention_spec(config: Config) -> DecoderSpec:
    """Right for attention and the norm before it; the MLP is none of GPT-OSS's."""
    bias = flag(config, "attention_bias", True)
    rope = config.get("rope_scaling") or config.get("rope_parameters") or _ROPE
    return decoder_spec(
        {"rope_theta": 150_000.0, "rms_norm_eps": 1e-5, **config, "rope_scaling": rope},
        "gpt_oss",
        windows=alternating_windows(config, 128, period=2),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        default_head_dim=64,
        default_kv_heads=8,
    )


def gpt_oss_spec(config: Config) -> DecoderSpec:
    raise UnsupportedModelError("GPT-OSS is not supported: its mixture of experts is missing here (attention is not)")


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", gpt_oss_spec, LLAMA_NAMES.rows)
