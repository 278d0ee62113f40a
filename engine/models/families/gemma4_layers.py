"""What Gemma 4's configs say of single layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import (
    Config,
    activation_of,
    alternating_windows,
    flag,
    integer,
    rope_spec,
    with_defaults,
)
from engine.models.families.mixtures import from_zero
from engine.models.json_file import shown
from engine.models.spec import LayerInputsSpec, RopeSpec

ROPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
)
_HEADS = ("head_dim", "num_key_value_heads")


def attention_windows(config: Config) -> list[int | None]:
    """The last layer sees all, whatever `layer_types` says. Raises UnsupportedModelError where tokens see later ones;
    "vision" lets those of images alone."""
    both_ways = config.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):
        raise UnsupportedModelError(f"use_bidirectional_attention {shown(both_ways)} is not supported: text is causal")
    return [*alternating_windows(with_defaults(config, sliding_window=512), 512, period=6)[:-1], None]


def wide_heads(config: Config, rope: Config, windows: list[int | None]) -> tuple[dict[str, object], RopeSpec]:
    """What layers that see all have of their own in a `MixerSpec`, and the rope, their second."""
    same = flag(config, "attention_k_eq_v")
    own = {
        "head_dim": integer(config, "global_head_dim", 512),
        "num_key_value_heads": config.get("num_global_key_value_heads") if same else None,
    }
    listed = config.get("per_layer_config")
    if listed is not None:
        own = _listed(listed, {index for index, window in enumerate(windows) if window is None})
    heads, head_dim = integer(config, "num_attention_heads"), integer(own, "head_dim", integer(config, "head_dim", 256))
    kv_heads = integer(own, "num_key_value_heads", integer(config, "num_key_value_heads", 4))
    if heads % kv_heads:
        raise ConfigError(f"{heads} query heads are not a multiple of {kv_heads} key-value heads of full_attention")
    if head_dim % 2:
        raise ConfigError(f"global_head_dim {head_dim} is odd")
    turned = rope_spec({**config, "rope_parameters": rope}, head_dim, integer(config, "max_position_embeddings"))
    values = "normed_keys" if same else "normed"
    return {"num_kv_heads": kv_heads, "head_dim": head_dim, "rope": 1, "values": values}, turned


def _listed(listed: object, wide: set[int]) -> dict[str, object]:
    """As transformers writes it: by index, of two digits where there are more than ten layers."""
    found = [dict(each) for each in listed.values() if isinstance(each, Mapping)] if isinstance(listed, Mapping) else []
    named = {int(name) if str(name).isdecimal() else -1 for name in listed} if isinstance(listed, Mapping) else set()
    alike = bool(found) and all(each == found[0] for each in found) and set(found[0]) <= set(_HEADS)
    if not isinstance(listed, Mapping) or len(found) != len(listed) or named != wide or not alike:
        raise UnsupportedModelError(
            f"per_layer_config must hold the same {' and '.join(_HEADS)} for each layer that sees all, and no others; "
            f"found {shown(listed)}"
        )
    return found[0]


def keepers(config: Config, windows: list[int | None]) -> list[int | None]:
    """Whose keys each layer reads; None: its own. The last `num_kv_shared_layers` read those of the last layer before
    them with the same window. Raises ConfigError."""
    first = len(windows) - from_zero(config, "num_kv_shared_layers", 0)
    last = {window: index for index, window in enumerate(windows[: max(first, 0)])}
    if any(window not in last for window in windows[max(first, 0) :]):
        raise ConfigError(f"num_kv_shared_layers {len(windows) - first} leaves no layer of a type with keys of its own")
    return [None if index < first else last[window] for index, window in enumerate(windows)]


def layer_inputs(config: Config) -> LayerInputsSpec | None:
    if config.get("hidden_size_per_layer_input", 256) in (None, 0):
        return None
    tokens, known = integer(config, "vocab_size"), integer(config, "vocab_size_per_layer_input", 262_144)
    if known < tokens:
        raise UnsupportedModelError(f"vocab_size_per_layer_input {known} is not supported: there are {tokens} tokens")
    return LayerInputsSpec(
        size=integer(config, "hidden_size_per_layer_input", 256),
        vocab_size=known,
        activation=activation_of(config, "hidden_act", "gelu_pytorch_tanh"),
    )
