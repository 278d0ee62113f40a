"""Kimi Linear: Kimi's delta attention (`engine/models/delta_net.py`), in some layers latent attention that turns
nothing, and DeepSeek-V3's experts behind the first ones."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import Config, Family, integer, refuse, with_defaults
from engine.models.families.latents import latent_spec
from engine.models.families.mixtures import named_sparse, sigmoid_router, with_deepseek_experts
from engine.models.families.names import Names
from engine.models.families.rows import ExpertNames, Rows, linears
from engine.models.json_file import shown
from engine.models.mixers import DeltaSpec
from engine.models.spec import DecoderSpec

_CALLED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""what a config calls so, and DeepSeek's"""
_FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}


def kimi_linear_spec(config: Config) -> DecoderSpec:
    for key, only in _FIXED.items():
        if config.get(key, only) != only:
            raise UnsupportedModelError(f"{key}={shown(config[key])} is not supported; supported is {shown(only)}")
    refuse(config, {"num_nextn_predict_layers": "Kimi Linear has no layers that predict further tokens"})
    config = {**config, **{ours: config[theirs] for theirs, ours in _CALLED.items() if theirs in config}}
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    experts = {"n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 1024, "num_experts_per_tok": 8}
    config = with_defaults(config, **sizes, **experts, max_position_embeddings=2**20, rms_norm_eps=1e-5)
    spec = latent_spec(config, "kimi_linear", turns=False)
    spec = with_deepseek_experts(
        spec, config, sigmoid_router(with_defaults(config, routed_scaling_factor=2.446)), named_sparse(config, 1)
    )
    delta, attends = _linear(config, spec.num_layers)
    layers = (layer if its else replace(layer, mixer=delta) for layer, its in zip(spec.layers, attends, strict=True))
    return replace(spec, layers=tuple(layers))


def _linear(config: Config, count: int) -> tuple[DeltaSpec, list[bool]]:
    """And of each layer whether it attends. Checkpoints say it all in an object, where layers are counted from 1."""
    inside = config.get("linear_attn_config") or {}
    if not isinstance(inside, Mapping):
        raise ConfigError(f"linear_attn_config must be an object, found {shown(inside)}")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
    sizes = {**config, **{ours: inside[theirs] for theirs, ours in names.items() if theirs in inside}}
    heads, size = integer(sizes, "linear_num_heads", 32), integer(sizes, "linear_head_dim", 128)
    taps = integer(sizes, "linear_conv_kernel_dim", 4)
    delta = DeltaSpec(key_heads=heads, value_heads=heads, key_dim=size, value_dim=size, taps=taps, rank=size)
    full, kinds = inside.get("full_attn_layers"), config.get("layer_types")
    if kinds is None and isinstance(full, list):
        kinds = ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(count)]
    elif kinds is None:
        kinds = ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {"full_attention", "linear_attention"}:
        raise ConfigError(f"layer_types must name full_attention or linear_attention {count} times: {shown(kinds)}")
    return delta, [kind == "full_attention" for kind in kinds]


class _Names(Names, frozen=True, kw_only=True):
    def delta_rows(self, spec: DecoderSpec, mixer: DeltaSpec, source: str, target: str) -> dict[str, Rows]:
        inner, heads, rank = mixer.value_size, mixer.value_heads, mixer.rank or 0
        first = ("q_proj", "k_proj", "v_proj", "g_a_proj", "b_proj", "f_a_proj")
        rows = linears(source, first, f"{target}.qkv_proj", [inner, inner, inner, rank, heads, rank], False)
        rows |= linears(source, ("o_proj",), f"{target}.o_proj", [spec.hidden_size], False)
        rows |= linears(source, ("g_b_proj",), f"{target}.low_rank.gate_b_proj", [inner], False)
        rows |= linears(source, ("f_b_proj",), f"{target}.low_rank.decay_b_proj", [mixer.decay_size], False)
        rows |= linears(source, ("q_conv1d", "k_conv1d", "v_conv1d"), f"{target}.mixing", [inner] * 3, False)
        rows[f"{source}.A_log"] = Rows(f"{target}.mixing.log_decay", 0, heads, "among ones")
        rows[f"{source}.dt_bias"] = Rows(f"{target}.mixing.decay_bias", 0, mixer.decay_size)
        rows[f"{source}.o_norm.weight"] = Rows(f"{target}.mixing.norm", 0, mixer.value_dim)
        return rows


_MOE = "block_sparse_moe"
_NAMES = _Names(
    delta="self_attn",
    experts=ExpertNames(
        router=f"{_MOE}.gate",
        correction=f"{_MOE}.gate.e_score_correction_bias",
        experts=f"{_MOE}.experts",
        parts=("w1", "w3", "w2"),
        shared=tuple(f"{_MOE}.shared_experts.{part}_proj" for part in ("gate", "up", "down")),
    ),
)
_MLP = {f".mlp.{part}_proj.weight": f".{_MOE}.{part}_proj.weight" for part in ("gate", "up", "down")}
"""transformers saves dense MLPs so"""
KIMI_LINEAR = Family("kimi_linear", "KimiLinearForCausalLM", kimi_linear_spec, _NAMES.rows, formerly=_MLP)
