"""What families with latent attention share: DeepSeek's names of its sizes, and the scale of scores."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from engine.errors import UnsupportedModelError
from engine.models.facts import LatentFacts
from engine.models.families.common import Config, decoder_spec, flag, integer, num_layers, refuse
from engine.models.mixers import LatentSpec
from engine.models.spec import DecoderSpec


def latent_spec(config: Config, family: str, turns: bool = True) -> DecoderSpec:
    """Llama with latent attention. `turns`: parts of queries and keys. Raises ConfigError, UnsupportedModelError."""
    refuse(config, {"attention_bias": "matrices of latent attention have no biases"})
    if not flag(config, "rope_interleave", True):
        raise UnsupportedModelError("rope_interleave=false is not supported: latent attention turns neighbouring pairs")
    facts = LatentFacts(
        kv_lora_rank=integer(config, "kv_lora_rank"),
        qk_rope_head_dim=integer(config, "qk_rope_head_dim"),
        qk_nope_head_dim=integer(config, "qk_nope_head_dim"),
        v_head_dim=integer(config, "v_head_dim"),
    )
    heads = integer(config, "num_attention_heads")
    turned = {"head_dim": facts.qk_rope_head_dim, "num_key_value_heads": heads}
    spec = decoder_spec({**config, **turned}, family, windows=[None] * num_layers(config), default_rotary=1.0)
    mixer = LatentSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=facts.row_size,
        scale=facts.qk_head_dim**-0.5 * _stretched(spec.ropes[0].params) ** 2,
        latent=facts,
        q_lora_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        rope=0 if turns else None,
    )
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))


def _stretched(rope: Mapping[str, float]) -> float:
    """What YaRN multiplies queries with, and keys, beside what the rope's table has of it (DeepSeek's
    `mscale_all_dim`)."""
    mscale, factor = rope.get("mscale_all_dim", 0.0), rope.get("factor", 1.0)
    return 0.1 * mscale * math.log(factor) + 1.0 if mscale and factor > 1 else 1.0
