"""Gemma 2: norms before and after attention and MLP, 1 + weight in each, scaled embeddings, soft caps, and a window on
every other layer."""

from __future__ import annotations

import msgspec

from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    alternating_windows,
    decoder_spec,
    flag,
    number,
    optional_number,
    refuse,
)
from engine.models.families.names import Names
from engine.models.mixers import QkNorm
from engine.models.spec import DecoderSpec

GEMMA_NAMES = Names(norms_stored="less one")


def gemma_spec(
    config: Config,
    family: str,
    windows: list[int | None],
    *,
    qk_norm: QkNorm | None = None,
    soft_cap: float | None = None,
    local_rope: Config | None = None,
) -> DecoderSpec:
    """What Gemma 2 and 3 have in common."""
    refuse(config, {"use_bidirectional_attention": "attention is causal"})
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config,
        family,
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=soft_cap,
        local_rope=local_rope,
        activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        default_head_dim=256,
        default_kv_heads=4,
    )
    return msgspec.structs.replace(
        spec,
        norm="rms_wide",
        norm_placement="around",
        embedding_scale=spec.hidden_size**0.5,
        round_embedding_scale=True,
    )


def gemma2_spec(config: Config) -> DecoderSpec:
    soft_cap = optional_number(config, "attn_logit_softcapping", 50.0)
    return msgspec.structs.replace(
        gemma_spec(config, "gemma2", alternating_windows(config, 4096, period=2), soft_cap=soft_cap),
        logit_cap=optional_number(config, "final_logit_softcapping", 30.0),
    )


GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", gemma2_spec, GEMMA_NAMES.rows)
