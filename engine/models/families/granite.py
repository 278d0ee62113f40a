"""Granite 3 (dense): Llama with a number for attention scores, embeddings, logits, and what joins the residual.

The last, m, costs nothing here. With h' = h / m, h + m f(norm(h)) becomes h' + f(norm(m h')), and an RMSNorm of m h'
is that of h' with an epsilon over m². So embeddings are divided by m, epsilons by its square, and no layer multiplies:
sums round as they did, relative to their size, and one rounding of each is saved. (Scaled weights would round anew, and
a GGUF file's blocks cannot be.) What passes between layers is 1 / m as large, 4.5 times: float16 has room for that less
than bfloat16.
"""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers, number
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def granite_spec(config: Config, family: str = "granite", turns: bool = True) -> DecoderSpec:
    """`turns`: q and k are turned."""
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config,
        family,
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        turned=[turns] * num_layers(config),
        scale=number(config, "attention_multiplier", 1.0),
    )
    unit = number(config, "residual_multiplier", 1.0)
    return replace(
        spec,
        norm_eps=spec.norm_eps / unit**2,
        embedding_scale=number(config, "embedding_multiplier", 1.0) / unit,
        state_unit=unit,
        logit_scale=1.0 / number(config, "logits_scaling", 1.0),
    )


GRANITE = Family("granite", "GraniteForCausalLM", granite_spec, LLAMA_NAMES.rows)
