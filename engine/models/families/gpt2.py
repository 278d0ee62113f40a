"""GPT-2: LayerNorm, learned positions, a plain MLP with GELU, biases; matrices are stored [inputs, outputs]."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, activation_of, flag, integer, number, refuse
from engine.models.families.rows import Rows
from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec


def gpt2_spec(config: Config) -> DecoderSpec:
    refuse(
        config,
        {
            "scale_attn_by_inverse_layer_idx": "all layers scale attention scores alike",
            "add_cross_attention": "there is no encoder",
        },
    )
    hidden_size, num_heads = integer(config, "n_embd", 768), integer(config, "n_head", 12)
    if hidden_size % num_heads:
        raise ConfigError(f"n_embd {hidden_size} is not a multiple of {num_heads} heads")
    head_dim = hidden_size // num_heads
    mixer = MixerSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
    )
    mlp = MlpSpec(
        intermediate_size=integer(config, "n_inner", 4 * hidden_size),
        activation=activation_of(config, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    return DecoderSpec(
        family="gpt2",
        vocab_size=integer(config, "vocab_size", 50257),
        hidden_size=hidden_size,
        layers=(LayerSpec(mixer=mixer, mlp=mlp),) * integer(config, "n_layer", 12),
        position_offset=0,
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        max_position=integer(config, "n_positions", 1024),
    )


def gpt2_weight_rows(spec: DecoderSpec) -> dict[str, Rows]:
    hidden, inner = spec.hidden_size, spec.facts.intermediate_size
    rows = {
        "transformer.wte.weight": Rows("embed_tokens.weight", 0, spec.vocab_size),
        "transformer.wpe.weight": Rows("embed_positions.weight", 0, spec.max_position),
        "transformer.ln_f.weight": Rows("norm.weight", 0, hidden),
        "transformer.ln_f.bias": Rows("norm.bias", 0, hidden),
    }
    if not spec.tie_embeddings:
        rows["lm_head.weight"] = Rows("lm_head.weight", 0, spec.vocab_size)
    matrices = [
        ("attn.c_attn", "qkv_proj", 3 * hidden),
        ("attn.c_proj", "o_proj", hidden),
        ("mlp.c_fc", "gate_up_proj", inner),
        ("mlp.c_proj", "down_proj", hidden),
    ]
    for layer in range(spec.num_layers):
        source, target = f"transformer.h.{layer}", f"layers.{layer}"
        for name, parameter, count in matrices:
            rows[f"{source}.{name}.weight"] = Rows(f"{target}.{parameter}.weight", 0, count, transposed=True)
            rows[f"{source}.{name}.bias"] = Rows(f"{target}.{parameter}.bias", 0, count)
        for name, parameter in (("ln_1", "input_norm"), ("ln_2", "mlp_norm")):
            for part in ("weight", "bias"):
                rows[f"{source}.{name}.{part}"] = Rows(f"{target}.{parameter}.{part}", 0, hidden)
    return rows


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    gpt2_spec,
    gpt2_weight_rows,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)
