"""GLM-4: half of each head turns, in neighbouring pairs; gate and up in one matrix of the checkpoint. The models of
2025 (`glm4`) have norms before and after attention and MLP."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers, with_defaults
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def glm_spec(config: Config, family: str = "glm") -> DecoderSpec:
    return decoder_spec(
        with_defaults(config, rms_norm_eps=1.5625e-07),
        family,
        windows=[None] * num_layers(config),
        qkv_bias=flag(config, "attention_bias", True),
        default_rotary=0.5,
        default_head_dim=128,
        default_kv_heads=2,
    )


def glm4_spec(config: Config) -> DecoderSpec:
    return replace(glm_spec(config, "glm4"), norm_placement="around")


GLM_NAMES = Names(gate_up=("mlp.gate_up_proj",), qkv_stored="pairs")
GLM4_NAMES = replace(
    GLM_NAMES,
    norms=(
        ("input_layernorm", "input_norm"),
        ("post_self_attn_layernorm", "attention_out_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("post_mlp_layernorm", "mlp_out_norm"),
    ),
)
GLM = Family("glm", "GlmForCausalLM", glm_spec, GLM_NAMES.rows)
GLM4 = Family("glm4", "Glm4ForCausalLM", glm4_spec, GLM4_NAMES.rows)
