"""What the families share: typed reading of a Hugging Face config, RoPE and windows (weight names: `names.py`).

Defaults are those of transformers' config classes, because `config.json` leaves out what equals them. Values outside
`engine.models.bounds` are refused; messages name the key, and whoever read the file puts its name before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.bounds import CONFIG_RANGES
from engine.models.families.mtp import MtpNames
from engine.models.families.rows import Rows
from engine.models.heads import HEADS, HeadForm
from engine.models.json_file import shown
from engine.models.mixers import MixerSpec, QkNorm
from engine.models.spec import Activation, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

Config = Mapping[str, object]
RopeKind = Literal["default", "linear", "proportional", "llama3", "yarn", "longrope"]
_ROPE_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "proportional": "proportional",
}
_ROPE_NUMBERS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor",),
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


class Wrapper(msgspec.Struct, frozen=True):
    """Checkpoints that hold a family's model beside what sees: it alone is served, by their `text_config`."""

    architecture: str
    prefix: str = "language_model."
    """of the text model's names"""
    replaces: str = ""
    """what that prefix stands for, in the names that the family knows"""
    others: tuple[str, ...] = ("vision_model.", "multi_modal_projector.")
    """prefixes of what is left out"""

    def name_of(self, name: str) -> str:
        """What the checkpoint calls a tensor that the family knows as `name`."""
        return f"{self.prefix}{name.removeprefix(self.replaces)}" if name.startswith(self.replaces) else name


class Family(msgspec.Struct, frozen=True):
    name: str
    """also the `model_type` of its configs"""
    architecture: str
    spec: Callable[[Config], DecoderSpec]
    weight_rows: Callable[[DecoderSpec], dict[str, Rows]]
    """checkpoint name → place, for every tensor that a checkpoint of this spec must hold"""
    prefix: str = "model."
    """of the names, but for the head; checkpoints of the bare model lack it"""
    formerly: Mapping[str, str] = {}
    """what endings of names were in old checkpoints"""
    ignored: tuple[str, ...] = ()
    """endings of names that a checkpoint may hold beside these, and that hold no weights"""
    gguf_rows: Callable[[DecoderSpec], dict[str, Rows]] | None = None
    """the same under the names that gguf's own map knows, where those differ"""
    stacked_rows: Callable[[DecoderSpec], dict[str, Rows]] | None = None
    """the same of checkpoints that stack a layer's experts, of a family that has both kinds"""
    causal: bool = True
    """a decoder; else an encoder, whose attention looks both ways"""
    heads: Mapping[str, HeadForm] = HEADS
    """of models that judge texts, by what stands in their architecture's name in the place of ForCausalLM"""
    predicts_more: bool = False
    """a checkpoint may hold layers beyond the model's, which predict further tokens and are left out"""
    wrapper: Wrapper | None = None
    mtp: MtpNames | None = None
    """the first of those layers, where it is known how it is used"""


def with_defaults(config: Config, **defaults: object) -> Config:
    """`defaults` where the config has nothing, or null."""
    return {**config, **{key: value for key, value in defaults.items() if config.get(key) is None}}


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer; `default` where the key is absent or null."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{key} must be a positive integer, found {shown(value)}")
    _check_range(key, value)
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ConfigError(f"{key} must be a number, found {shown(value)}")
    _check_range(key, value)
    return float(value)


def _check_range(key: str, value: float) -> None:
    allowed = CONFIG_RANGES[key]
    if not allowed.holds(value):
        raise ConfigError(f"{key} must be in {allowed}, found {shown(value)}")


def check_ranges(config: Config) -> None:
    """Raises ConfigError for any number that is out of bounds."""
    for key in CONFIG_RANGES:
        value = config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_range(key, value)


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, found {shown(value)}")
    return default if value is None else value


def optional_number(config: Config, key: str, default: float | None = None) -> float | None:
    """None where the config says null."""
    return None if config.get(key, default) is None else number(config, key, default)


def activation_of(config: Config, key: str, default: str) -> Activation:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"{key} {shown(name)} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _causal(config: Config, windows: list[int | None]) -> bool:
    causal = flag(config, "is_causal", True)
    if not causal and any(windows):
        raise UnsupportedModelError("is_causal false is not supported where layers have windows")
    return causal


def refuse(config: Config, reasons: Mapping[str, str]) -> None:
    """Raises UnsupportedModelError where a key that would change what is computed is set; `reasons`: what it does."""
    for key, reason in reasons.items():
        if config.get(key):
            raise UnsupportedModelError(f"{key}={shown(config[key])} is not supported: {reason}")


def decoder_spec(
    config: Config,
    family: str,
    *,
    windows: list[int | None],
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    gated: bool = True,
    qk_norm: QkNorm | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    local_rope: Config | None = None,
    turned: Sequence[bool] | None = None,
    default_rotary: float | None = None,
    activation: Activation | Literal["xielu"] | None = None,
    tied: bool = False,
    epsilon: str = "rms_norm_eps",
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
) -> DecoderSpec:
    """The spec of a pre-norm RMSNorm, gated, RoPE decoder, whose layers differ in their windows and ropes alone.

    `scale`, `activation`: None for head_dim ** -0.5, and what `hidden_act` says. `local_rope`: what layers with a
    window have in the place of the config's rope. `turned`: which layers turn q and k; None: all. `default_rotary`: how
    much of a head they turn where the config does not say; None: all of it, always. `tied`: where the config says
    nothing of embeddings. `epsilon`: its key. Raises ConfigError, UnsupportedModelError.
    """
    num_heads, num_kv_heads, head_dim = _heads(config, default_head_dim, default_kv_heads)
    ropes, max_position = _ropes(config, local_rope, head_dim, default_rotary)
    mlp = MlpSpec(
        intermediate_size=integer(config, "intermediate_size"),
        activation=activation or activation_of(config, "hidden_act", "silu"),
        gated=gated,
        bias=mlp_bias,
    )
    mixer = MixerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        sinks=sinks,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )
    return DecoderSpec(
        family=family,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        layers=tuple(_layers(mixer, mlp, windows, turned, len(ropes) - 1)),
        ropes=ropes,
        norm_eps=number(config, epsilon, 1e-6),
        tie_embeddings=flag(config, "tie_word_embeddings", tied),
        max_position=max_position,
        causal=_causal(config, windows),
    )


def _heads(config: Config, default_head_dim: int | None, default_kv_heads: int | None) -> tuple[int, int, int]:
    """Of queries, of keys, and the dimension of either; defaults are for keys that are absent, not null."""
    num_heads = integer(config, "num_attention_heads")
    kv_heads = (None if "num_key_value_heads" in config else default_kv_heads) or num_heads
    dim = (None if "head_dim" in config else default_head_dim) or integer(config, "hidden_size") // num_heads
    num_kv_heads, head_dim = integer(config, "num_key_value_heads", kv_heads), integer(config, "head_dim", dim)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd")
    return num_heads, num_kv_heads, head_dim


def _ropes(
    config: Config, local_rope: Config | None, head_dim: int, default_rotary: float | None
) -> tuple[tuple[RopeSpec, ...], int]:
    """And how many positions there are."""
    trained_positions = integer(config, "max_position_embeddings")
    rope = rope_spec(config, head_dim, trained_positions, default_rotary)
    max_position = _reachable_positions(rope, trained_positions)
    if local_rope is None:
        return (rope,), max_position
    return (rope, rope_spec(local_rope, head_dim, max_position)), max_position


def _layers(
    mixer: MixerSpec, mlp: MlpSpec, windows: list[int | None], turned: Sequence[bool] | None, local: int
) -> Iterator[LayerSpec]:
    """`local`: the rope of layers with a window."""
    for window, turns in zip(windows, turned or [True] * len(windows), strict=True):
        rope = None if not turns else 0 if window is None else local
        yield LayerSpec(mixer=replace(mixer, window=window, rope=rope), mlp=mlp)


def num_layers(config: Config) -> int:
    return integer(config, "num_hidden_layers")


def turned_layers(config: Config) -> list[bool]:
    """`no_rope_layers` is 1 for layers that do turn."""
    listed, count = config.get("no_rope_layers"), num_layers(config)
    if not listed:
        interval = integer(config, "no_rope_layer_interval", 4)
        return [bool((layer + 1) % interval) for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(turns not in (0, 1) for turns in listed):
        raise ConfigError(f"no_rope_layers must hold 0 or 1 for each of the {count} layers, found {shown(listed)}")
    return [bool(turns) for turns in listed[:count]]


def layer_type_windows(config: Config) -> list[int | None]:
    """Qwen's rule: `use_sliding_window` switches it on; `layer_types`, or else `max_window_layers`, say where."""
    count = num_layers(config)
    if not flag(config, "use_sliding_window") or config.get("sliding_window", 4096) is None:
        return [None] * count
    window = integer(config, "sliding_window", 4096)
    if config.get("layer_types") is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise ConfigError(f"max_window_layers must be an integer of at least 0, found {shown(first)}")
        return [window if layer >= first else None for layer in range(count)]
    return named_windows(config, window)


def alternating_windows(config: Config, default_window: int, period: int) -> list[int | None]:
    """`layer_types`, or else every `period`th layer sees all and those between them a window."""
    if config.get("sliding_window", default_window) is None:
        return [None] * num_layers(config)
    window = integer(config, "sliding_window", default_window)
    if config.get("layer_types") is None:
        return [window if (layer + 1) % period else None for layer in range(num_layers(config))]
    return named_windows(config, window)


def named_windows(config: Config, window: int) -> list[int | None]:
    """`window` where `layer_types` says sliding_attention."""
    layer_types, count = config.get("layer_types"), num_layers(config)
    if not isinstance(layer_types, list) or len(layer_types) != count:
        raise ConfigError(f"layer_types must name the type of each of the {count} layers")
    unknown = sorted({str(kind) for kind in layer_types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types {shown(unknown)} are not supported (full_attention and sliding_attention are)"
        )
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def chunks_of(config: Config, chunked: Sequence[bool]) -> list[int | None]:
    """`attention_chunk_size` where `layer_types`, or else `chunked`, say so."""
    kinds = ("full_attention", "chunked_attention")
    if config.get("attention_chunk_size", 8192) is None:
        chunked = [False] * len(chunked)
    given = config.get("layer_types") or [kinds[its] for its in chunked]
    if not isinstance(given, list) or len(given) != len(chunked) or any(kind not in kinds for kind in given):
        raise UnsupportedModelError(f"layer_types must name {' or '.join(kinds)} for each of {len(chunked)} layers")
    chunk = integer(config, "attention_chunk_size", 8192) if kinds[1] in given else None
    return [chunk if kind == kinds[1] else None for kind in given]


def rope_spec(config: Config, head_dim: int, max_position: int, default_rotary: float | None = None) -> RopeSpec:
    """Both `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before). `default_rotary`: see
    `decoder_spec`."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"{key} must be an object, found {shown(parameters)}")
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedModelError(f"{key} that differ between layer types are not supported for this family")
    name = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if name not in _ROPE_KINDS:
        raise UnsupportedModelError(f"rope_type {shown(name)} is not supported; supported are {', '.join(_ROPE_KINDS)}")
    merged = {**{key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}, **parameters}
    kind = _ROPE_KINDS[name]
    share = number(merged, "partial_rotary_factor", default_rotary or 1.0)
    if kind == "proportional":
        merged |= {"factor": number(merged, "factor", 1.0)}
    elif share != 1.0 and default_rotary is None:
        raise UnsupportedModelError("partial_rotary_factor other than 1 is not supported for this family")
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"partial_rotary_factor {share} of head_dim {head_dim} is not a positive even number")
    original = None
    if kind in ("llama3", "yarn", "longrope"):
        inherited = integer(config, "original_max_position_embeddings", max_position)
        original = integer(parameters, "original_max_position_embeddings", inherited)
    if kind in ("yarn", "longrope") and original is not None and merged.get("factor") is None:
        merged["factor"] = max_position / original
    numbers = {key: number(merged, key) for key in _ROPE_NUMBERS[kind]}
    if kind == "llama3" and numbers["high_freq_factor"] < numbers["low_freq_factor"]:
        raise ConfigError(f"high_freq_factor must be at least low_freq_factor, found {shown(dict(parameters))}")
    if kind == "yarn":
        numbers |= {key: _option(merged, key) for key in _YARN_OPTIONS if merged.get(key) is not None}
    if kind == "proportional":
        numbers["share"] = share
    theta = number(merged, "rope_theta", 10000.0)
    rope = RopeSpec(kind=kind, theta=theta, rotary_dim=rotary_dim, params=numbers, original_max_position=original)
    return rope if kind != "longrope" else _with_factors(rope, merged)


def _with_factors(rope: RopeSpec, parameters: Config) -> RopeSpec:
    refuse(parameters, dict.fromkeys(("short_mscale", "long_mscale"), "cos and sin have one factor"))
    if rope.original_max_position is None or rope.original_max_position < 2:
        raise ConfigError("original_max_position_embeddings must be at least 2 for longrope")
    both = []
    for key in ("short_factor", "long_factor"):
        values, count = parameters.get(key), rope.rotary_dim // 2
        if not isinstance(values, list) or len(values) != count:
            raise ConfigError(f"{key} must be a list of {count} numbers, found {shown(values)}")
        both.append(tuple(number({key: value}, key) for value in values))
    params = dict(rope.params)
    if parameters.get("attention_factor") is not None:
        params["attention_factor"] = number(parameters, "attention_factor")
    return replace(rope, short_factors=both[0], long_factors=both[1], params=params)


def _option(parameters: Config, key: str) -> float:
    value = parameters[key]
    return number({key: int(value) if isinstance(value, bool) else value}, key)  # truncate is true or false


def _reachable_positions(rope: RopeSpec, trained_positions: int) -> int:
    """YaRN stretches the trained context; configs differ in whether max_position_embeddings says so already."""
    if rope.kind == "yarn" and rope.original_max_position is not None:
        stretched = max(1, int(rope.original_max_position * rope.params["factor"]))
        _check_range("max_position_embeddings", stretched)
        return max(trained_positions, stretched)
    return trained_positions
