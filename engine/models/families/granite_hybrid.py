"""Granite 4: Granite 3's mixtures, or one dense MLP, behind Mamba 2 in most layers; positions are told by nothing else,
unless the config says rope."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import ConfigError
from engine.models.families.common import Config, Family, flag, integer, num_layers, number, with_defaults
from engine.models.families.granite import granite_spec
from engine.models.families.granite_moe import EXPERTS, SHARED, granite_experts
from engine.models.families.mixtures import from_zero, with_experts
from engine.models.families.names import Names
from engine.models.json_file import shown
from engine.models.mixers import MambaSpec
from engine.models.spec import DecoderSpec

_KINDS = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}


def granite_hybrid_spec(config: Config) -> DecoderSpec:
    beside, experts = integer(config, "shared_intermediate_size", 1024), from_zero(config, "num_local_experts", 8)
    config = with_defaults(config, hidden_act="silu", max_position_embeddings=2048)
    spec = granite_spec(
        config if experts else {**config, "intermediate_size": beside},
        "granitemoehybrid",
        config.get("position_embedding_type") == "rope",
    )
    if experts:
        spec = with_experts(spec, granite_experts(config), beside=beside)
    mamba = mamba_spec(config, integer(config, "mamba_expand", 2) * spec.hidden_size)
    layers = zip(spec.layers, _kinds(config), strict=True)
    return replace(spec, layers=tuple(layer if attends else replace(layer, mixer=mamba) for layer, attends in layers))


def mamba_spec(config: Config, inner: int) -> MambaSpec:
    """By transformers' names; `inner`: values of all heads. Raises ConfigError."""
    heads = integer(config, "mamba_n_heads", 128)
    given = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if given in (None, "auto") else integer(config, "mamba_d_head")
    groups = integer(config, "mamba_n_groups", 1)
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"mamba_n_heads ({heads}) of mamba_d_head ({head_dim}) must be the {inner} values of all heads, and a "
            f"multiple of mamba_n_groups ({groups})"
        )
    return MambaSpec(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=integer(config, "mamba_d_state", 256),
        taps=integer(config, "mamba_d_conv", 4),
        bias=flag(config, "mamba_proj_bias"),
        conv_bias=flag(config, "mamba_conv_bias", True),
        amounts=amounts_of(config),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
    )


def amounts_of(config: Config) -> tuple[float, float]:
    """`MambaSpec.amounts`"""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    infinite = {"__float__": "Infinity"}  # as transformers writes it
    ends = [float("inf") if each == infinite else each for each in limits] if isinstance(limits, list) else []
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends):
        raise ConfigError(f"time_step_limit must be two numbers, found {shown(limits)}")
    return float(ends[0]), float(ends[1])


def _kinds(config: Config) -> list[bool]:
    """Of each layer, whether it attends."""
    count, named = num_layers(config), config.get("layer_types")
    if named is None:
        return [False] * count
    if not isinstance(named, list) or len(named) != count or not {*named} <= {*_KINDS}:
        raise ConfigError(f"layer_types must name one of {', '.join(_KINDS)} for {count} layers, found {shown(named)}")
    return [_KINDS[kind] for kind in named]


_NAMES = Names(
    gate_up=SHARED[:1],
    down=SHARED[1],
    experts=EXPERTS,
)
GRANITE_HYBRID = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", granite_hybrid_spec, _NAMES.rows)
