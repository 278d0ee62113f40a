"""LFM2: short convolutions between two gates, and grouped-query attention in some layers; LFM2-MoE, with experts behind
the first layers."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, decoder_spec, flag, integer, num_layers, number, with_defaults
from engine.models.families.mixtures import experts_spec, from_zero, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames
from engine.models.json_file import shown
from engine.models.spec import ConvSpec, DecoderSpec, RouterSpec

_NAMES = Names(
    final_norm="model.embedding_norm",
    o="self_attn.out_proj",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    norms=(("operator_norm", "input_norm"), ("ffn_norm", "mlp_norm")),
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    experts=ExpertNames(
        router="feed_forward.gate",
        correction="feed_forward.expert_bias",
        experts="feed_forward.experts",
        parts=("w1", "w3", "w2"),
    ),
)


def lfm2_spec(config: Config) -> DecoderSpec:
    inner = integer(config, "block_ff_dim", integer(config, "intermediate_size", 12288))
    if flag(config, "block_auto_adjust_ff_dim", True):
        multiple = integer(config, "block_multiple_of", 256)
        inner = int(number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    return _with_convolutions({**config, "intermediate_size": inner}, "lfm2")


def lfm2_moe_spec(config: Config) -> DecoderSpec:
    config = with_defaults(
        config, intermediate_size=7168, moe_intermediate_size=1792, num_experts=32, num_experts_per_tok=4
    )
    router = RouterSpec(
        kind="sigmoid",
        top_k=integer(config, "num_experts_per_tok"),
        normalise=flag(config, "norm_topk_prob", True),
        correction=flag(config, "use_expert_bias", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    dense = from_zero(config, "num_dense_layers", 2)
    sparse = [layer >= dense for layer in range(num_layers(config))]
    return with_experts(_with_convolutions(config, "lfm2_moe"), experts_spec(config, router, "num_experts"), sparse)


def _with_convolutions(config: Config, family: str) -> DecoderSpec:
    config = with_defaults(config, rope_theta=1e6, norm_eps=1e-5, hidden_act="silu")
    spec = decoder_spec(
        config,
        family,
        windows=[None] * num_layers(config),
        qk_norm="head",
        tied=flag(config, "tie_embedding", True),
        epsilon="norm_eps",
        default_kv_heads=8,
    )
    conv = ConvSpec(channels=spec.hidden_size, taps=integer(config, "conv_L_cache", 3), bias=flag(config, "conv_bias"))
    kinds = _kinds(config)
    layers = (layer if attends else replace(layer, mixer=conv) for layer, attends in zip(spec.layers, kinds))
    return replace(spec, layers=tuple(layers))


def _kinds(config: Config) -> list[bool]:
    """Of each layer, whether it attends."""
    count, named = num_layers(config), config.get("layer_types")
    if named is None:
        chosen = config.get("full_attn_idxs")
        if chosen is not None and not isinstance(chosen, list):
            raise ConfigError(f"full_attn_idxs must be a list of layers, found {shown(chosen)}")
        return [chosen is None or index in chosen for index in range(count)]
    if not isinstance(named, list) or len(named) != count or not {*named} <= {"full_attention", "conv"}:
        raise ConfigError(f"layer_types must name full_attention or conv for {count} layers, found {shown(named)}")
    return [kind == "full_attention" for kind in named]


LFM2 = Family("lfm2", "Lfm2ForCausalLM", lfm2_spec, _NAMES.rows)
LFM2_MOE = Family("lfm2_moe", "Lfm2MoeForCausalLM", lfm2_moe_spec, _NAMES.rows)
