"""What the Llama-shaped families share: typed reading of a Hugging Face config, RoPE, windows, and the weight names.

Defaults are those of transformers' config classes, because `config.json` leaves out what equals them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.spec import DecoderSpec, LayerSpec, RopeSpec

Config = Mapping[str, object]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
_ROPE_KINDS: dict[str, RopeKind] = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_ROPE_NUMBERS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


class Rows(msgspec.Struct, frozen=True):
    """Where a checkpoint tensor goes: rows `start .. start + count` of a parameter of `Decoder`."""

    parameter: str
    start: int
    count: int


class Family(msgspec.Struct, frozen=True):
    name: str
    """also the `model_type` of its configs"""
    architecture: str
    spec: Callable[[Config], DecoderSpec]
    weight_rows: Callable[[DecoderSpec], dict[str, Rows]]
    """checkpoint name → place, for every tensor that a checkpoint of this spec must hold"""


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)


def flag(config: Config, key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false, found {value!r}")
    return bool(value)


def decoder_spec(
    config: Config,
    family: str,
    *,
    windows: list[int | None],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
) -> DecoderSpec:
    """The spec of a pre-norm RMSNorm, SwiGLU, RoPE decoder; raises ConfigError, UnsupportedModelError."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {activation!r} is not supported for {family} (silu is)")
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    absent = "num_key_value_heads" not in config
    num_kv_heads = integer(config, "num_key_value_heads", (default_kv_heads if absent else None) or num_heads)
    head_dim = integer(config, "head_dim", default_head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"config.json: {num_heads} query heads are not a multiple of {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim} is odd")
    trained_positions = integer(config, "max_position_embeddings")
    rope = rope_spec(config, head_dim, trained_positions)
    return DecoderSpec(
        family=family,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=integer(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(window=window) for window in windows),
        rope=rope,
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        tie_embeddings=flag(config, "tie_word_embeddings"),
        max_position=_reachable_positions(rope, trained_positions),
        scale=head_dim**-0.5,
    )


def num_layers(config: Config) -> int:
    return integer(config, "num_hidden_layers")


def layer_type_windows(config: Config) -> list[int | None]:
    """Qwen's rule: `use_sliding_window` switches it on; `layer_types`, or else `max_window_layers`, say where."""
    count = num_layers(config)
    if not flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return [None] * count
    window = integer(config, "sliding_window", 4096)
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ConfigError(f"config.json: max_window_layers must be an integer, found {first!r}")
        return [window if layer >= first else None for layer in range(count)]
    if not isinstance(layer_types, list) or len(layer_types) != count:
        raise ConfigError(f"config.json: layer_types must name the type of each of the {count} layers")
    unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer types {', '.join(unknown)} are not supported (full_attention and sliding_attention are)"
        )
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def rope_spec(config: Config, head_dim: int, max_position: int) -> RopeSpec:
    """Both `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"config.json: rope_parameters must be an object, found {parameters!r}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError("rope parameters that differ between layer types are not supported for this family")
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if name not in _ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {name!r} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    merged = {**{key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}, **parameters}
    if number(merged, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported for this family")
    kind = _ROPE_KINDS[name]
    original = None
    if kind in ("llama3", "yarn"):
        inherited = integer(config, "original_max_position_embeddings", max_position)
        original = integer(parameters, "original_max_position_embeddings", inherited)
    if kind == "yarn" and original is not None and merged.get("factor") is None:
        merged["factor"] = max_position / original
    numbers = {key: number(merged, key) for key in _ROPE_NUMBERS[kind]}
    if kind == "yarn":
        numbers |= {key: _option(merged, key) for key in _YARN_OPTIONS if merged.get(key) is not None}
    theta = number(merged, "rope_theta", 10000.0)
    return RopeSpec(kind=kind, theta=theta, rotary_dim=head_dim, params=numbers, original_max_position=original)


def llama_weight_rows(spec: DecoderSpec) -> dict[str, Rows]:
    """The names that Llama gave and the other families kept. Q, K and V share one parameter, gate and up another."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows = {
        "model.embed_tokens.weight": Rows("embed_tokens.weight", 0, spec.vocab_size),
        "model.norm.weight": Rows("norm.weight", 0, hidden),
    }
    if not spec.tie_embeddings:
        rows["lm_head.weight"] = Rows("lm_head.weight", 0, spec.vocab_size)
    linears = [
        ("self_attn.q_proj", "qkv_proj", 0, q, spec.qkv_bias),
        ("self_attn.k_proj", "qkv_proj", q, kv, spec.qkv_bias),
        ("self_attn.v_proj", "qkv_proj", q + kv, kv, spec.qkv_bias),
        ("self_attn.o_proj", "o_proj", 0, hidden, spec.o_bias),
        ("mlp.gate_proj", "gate_up_proj", 0, inner, spec.mlp_bias),
        ("mlp.up_proj", "gate_up_proj", inner, inner, spec.mlp_bias),
        ("mlp.down_proj", "down_proj", 0, hidden, spec.mlp_bias),
    ]
    norms = [("input_layernorm", "input_norm", hidden), ("post_attention_layernorm", "post_attention_norm", hidden)]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", "q_norm", spec.head_dim), ("self_attn.k_norm", "k_norm", spec.head_dim)]
    for layer in range(spec.num_layers):
        for source, target, start, count, bias in linears:
            for part in ("weight", "bias") if bias else ("weight",):
                rows[f"model.layers.{layer}.{source}.{part}"] = Rows(f"layers.{layer}.{target}.{part}", start, count)
        for source, target, count in norms:
            rows[f"model.layers.{layer}.{source}.weight"] = Rows(f"layers.{layer}.{target}.weight", 0, count)
    return rows


def _option(parameters: Config, key: str) -> float:
    value = parameters[key]
    if not isinstance(value, (int, float)):
        raise ConfigError(f"config.json: rope parameter {key} must be a number, found {value!r}")
    return float(value)


def _reachable_positions(rope: RopeSpec, trained_positions: int) -> int:
    """YaRN stretches the trained context; configs differ in whether max_position_embeddings says so already."""
    if rope.kind == "yarn" and rope.original_max_position is not None:
        return max(trained_positions, int(rope.original_max_position * rope.params["factor"]))
    return trained_positions
