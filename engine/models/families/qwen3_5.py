"""Qwen3.5 (its text models) and Qwen3-Next: gated delta nets, and attention with a gate in every fourth layer."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import (
    Config,
    Family,
    Wrapper,
    decoder_spec,
    flag,
    integer,
    num_layers,
    with_defaults,
)
from engine.models.families.mixtures import experts_spec, sparse_layers, with_experts
from engine.models.families.mtp import MtpNames
from engine.models.families.names import Names
from engine.models.families.qwen_moe import SHARED
from engine.models.families.rows import ExpertNames
from engine.models.json_file import shown
from engine.models.mixers import DeltaSpec, MixerSpec
from engine.models.spec import DecoderSpec, RouterSpec

_NAMES = Names(norms_stored="less one")
_MIXTURE = Names(norms_stored="less one", experts=ExpertNames(shared=SHARED))
_STACKED = replace(_MIXTURE, experts=ExpertNames(stacked=True, parts=("gate_up_proj", "down_proj"), shared=SHARED))
_NEXT = Names(norms_stored="less one", delta_in=("in_proj_qkvz", "in_proj_ba"), experts=ExpertNames(shared=SHARED))


def qwen3_5_spec(config: Config, family: str = "qwen3_5_text", default_kv_heads: int = 4) -> DecoderSpec:
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        config,
        family,
        windows=[None] * num_layers(config),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        default_head_dim=256,
        default_kv_heads=default_kv_heads,
        default_rotary=0.25,
    )
    delta = DeltaSpec(
        key_heads=integer(config, "linear_num_key_heads", 16),
        value_heads=integer(config, "linear_num_value_heads", 32),
        key_dim=integer(config, "linear_key_head_dim", 128),
        value_dim=integer(config, "linear_value_head_dim", 128),
        taps=integer(config, "linear_conv_kernel_dim", 4),
    )
    if delta.value_heads % delta.key_heads:
        raise ConfigError(
            f"linear_num_value_heads ({delta.value_heads}) is not a multiple of linear_num_key_heads "
            f"({delta.key_heads})"
        )
    layers = []
    for layer, attends in zip(spec.layers, _kinds(config), strict=True):
        assert isinstance(layer.mixer, MixerSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, gated=True) if attends else delta))
    return replace(spec, layers=tuple(layers), norm="rms_wide")


def qwen3_5_moe_spec(config: Config, family: str = "qwen3_5_moe_text") -> DecoderSpec:
    beside = integer(config, "shared_expert_intermediate_size", 512)
    config = with_defaults(
        config,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        norm_topk_prob=True,
        intermediate_size=beside,
    )
    router = RouterSpec(top_k=integer(config, "num_experts_per_tok"), normalise=flag(config, "norm_topk_prob"))
    experts = replace(experts_spec(config, router, "num_experts"), gated_beside=True)
    return with_experts(qwen3_5_spec(config, family, 2), experts, sparse_layers(config), beside)


def qwen3_next_spec(config: Config) -> DecoderSpec:
    config = with_defaults(config, num_experts=512, num_experts_per_tok=10, intermediate_size=5632)
    return qwen3_5_moe_spec(config, "qwen3_next")


def _kinds(config: Config) -> list[bool]:
    """Of each layer, whether it attends."""
    count, named = num_layers(config), config.get("layer_types")
    if named is None:
        interval = integer(config, "full_attention_interval", 4)
        return [(index + 1) % interval == 0 for index in range(count)]
    if not isinstance(named, list) or len(named) != count or not {*named} <= {"full_attention", "linear_attention"}:
        raise ConfigError(f"layer_types must name full_attention or linear_attention {count} times: {shown(named)}")
    return [kind == "full_attention" for kind in named]


def _wrapper(architecture: str) -> Wrapper:
    return Wrapper(architecture, "model.language_model.", replaces="model.", others=("model.visual.",))


_COUNT = "mtp_num_hidden_layers"
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    qwen3_5_spec,
    _NAMES.rows,
    predicts_more=True,
    wrapper=_wrapper("Qwen3_5ForConditionalGeneration"),
    mtp=MtpNames(count=_COUNT, names=(_NAMES,)),
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    qwen3_5_moe_spec,
    _MIXTURE.rows,
    stacked_rows=_STACKED.rows,
    predicts_more=True,
    wrapper=_wrapper("Qwen3_5MoeForConditionalGeneration"),
    mtp=MtpNames(count=_COUNT, names=(_STACKED, _MIXTURE)),
)
QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    qwen3_next_spec,
    _NEXT.rows,
    predicts_more=True,
    mtp=MtpNames(count="num_nextn_predict_layers", names=(_NEXT,)),
)
