"""Nemotron-H: Mamba 2, attention without positions, and plain MLPs with squared ReLU, or experts that are such MLPs
(Nemotron 3), each with a norm and a place of its own in the checkpoint's count of layers; here a mixer and the MLP
behind it are a layer."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    decoder_spec,
    flag,
    integer,
    refuse,
    with_defaults,
)
from engine.models.families.granite_hybrid import amounts_of
from engine.models.families.mixtures import experts_spec, sigmoid_router, with_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames, Rows
from engine.models.json_file import shown
from engine.models.mixers import MambaSpec
from engine.models.spec import DecoderSpec

_SIGNS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_ALONE = {"mlp", "moe"}
"""what each token goes through alone"""
_FORMERLY = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h_spec(config: Config) -> DecoderSpec:
    kinds = _kinds(config)
    mixers = [(kind, [*kinds, ""][at + 1]) for at, kind in enumerate(kinds) if kind not in _ALONE]
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        with_defaults(config, layer_norm_epsilon=1e-5, max_position_embeddings=4096, rope_theta=1e4),
        "nemotron_h",
        windows=[None] * len(mixers),
        turned=[False] * len(mixers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        gated=False,
        activation=activation_of(config, "mlp_hidden_act", "relu2"),
        epsilon="layer_norm_epsilon",
        default_head_dim=128,
        default_kv_heads=8,
    )
    mamba = MambaSpec(
        heads=integer(config, "mamba_num_heads", 128),
        head_dim=integer(config, "mamba_head_dim", 64),
        groups=integer(config, "n_groups", 8),
        state_size=integer(config, "ssm_state_size", 128),
        taps=integer(config, "conv_kernel", 4),
        bias=flag(config, "use_bias"),
        conv_bias=flag(config, "use_conv_bias", True),
        amounts=amounts_of(config),
        norm_eps=spec.norm_eps,
    )
    if mamba.heads % mamba.groups:
        raise ConfigError(f"mamba_num_heads ({mamba.heads}) is not a multiple of n_groups ({mamba.groups})")
    if "moe" in kinds:
        spec = _with_experts(spec, config, [follows == "moe" for _, follows in mixers])
    layers = []
    for layer, (kind, follows) in zip(spec.layers, mixers, strict=True):
        its = layer if follows in _ALONE else replace(layer, mlp=None)
        layers.append(replace(its, mixer=mamba) if kind == "linear_attention" else its)
    return replace(spec, layers=tuple(layers), norm="rms_wide")


def _with_experts(spec: DecoderSpec, config: Config, sparse: list[bool]) -> DecoderSpec:
    no_biases = "experts, and the MLP beside them, have no biases"
    refuse(config, {"mlp_bias": no_biases, "moe_latent_size": "experts are given what the layer is"})
    sizes = {"n_routed_experts": 8, "moe_intermediate_size": 7688, "num_experts_per_tok": 2}
    config = with_defaults(config, **sizes, moe_shared_expert_intermediate_size=7688)
    activation = activation_of(config, "mlp_hidden_act", "relu2")
    experts = experts_spec(config, sigmoid_router(config), "n_routed_experts")
    experts = replace(experts, gated=False, activation=activation)
    return with_experts(spec, experts, sparse, integer(config, "moe_shared_expert_intermediate_size"))


def _kinds(config: Config) -> list[str]:
    """Of all that the checkpoint calls layers."""
    pattern, named = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    if isinstance(pattern, str):
        named = [_SIGNS.get(sign, sign) for sign in pattern]
    if not isinstance(named, list) or not named:
        raise ConfigError(f"layers_block_type must name the kinds of the layers, found {shown(named)}")
    kinds = [_FORMERLY.get(str(kind), str(kind)) for kind in named]
    if unknown := sorted({*kinds} - {"linear_attention", "full_attention", *_ALONE}):
        raise UnsupportedModelError(f"layers_block_type: {shown(unknown)} are not supported")
    if any({kind, before} <= _ALONE for kind, before in zip(kinds, ["mlp", *kinds])):
        raise UnsupportedModelError("layers_block_type: an MLP without a mixer before it is not supported")
    return kinds


_NAMES = Names(
    embedding="backbone.embeddings",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    norms=(("norm", "input_norm"), ("behind.norm", "mlp_norm")),
    mamba="mixer",
    experts=ExpertNames(
        router="mixer.gate",
        correction="mixer.gate.e_score_correction_bias",
        experts="mixer.experts",
        parts=("up_proj", "down_proj"),
        shared=("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    ),
)
_BEHIND = ("gate_up_proj.", "down_proj.", "mlp_norm.", "router.", "experts.")


def _rows(spec: DecoderSpec) -> dict[str, Rows]:
    rows, at = _NAMES.rows(replace(spec, layers=())), 0
    for index, layer in enumerate(spec.layers):
        target = f"layers.{index}."
        for name, row in _NAMES.layer_rows(spec, index, "", target[:-1]).items():
            behind = row.parameter.removeprefix(target).startswith(_BEHIND)
            rows[f"backbone.layers.{at + behind}{name.replace('behind.', '')}"] = row
        at += 1 if layer.ends_with_mixer else 2
    return rows


NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM", nemotron_h_spec, _rows, prefix="backbone.", predicts_more=True
)
