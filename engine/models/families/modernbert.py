"""ModernBERT: an encoder with the parts of a decoder. RoPE, gated MLPs, norms before; most layers see a window on
either side, and turn by a base of their own. The first layer's attention has no norm: the embeddings have one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import (
    Config,
    Family,
    activation_of,
    decoder_spec,
    flag,
    integer,
    named_windows,
    num_layers,
    refuse,
    with_defaults,
)
from engine.models.families.names import Names
from engine.models.heads import HeadForm
from engine.models.json_file import shown
from engine.models.spec import DecoderSpec

_SIZES = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
}


def modernbert_spec(config: Config) -> DecoderSpec:
    refuse(config, {"norm_bias": "norms have no bias", "classifier_bias": "the layer before the classifier has none"})
    if config.get("classifier_activation") not in (None, "gelu"):
        activation = shown(config["classifier_activation"])
        raise UnsupportedModelError(f"classifier_activation {activation} is not supported; gelu is")
    config = with_defaults(config, **_SIZES)
    bias = flag(config, "attention_bias")
    full, local = (_rope(config, kind, base) for kind, base in (("full", 160_000.0), ("sliding", 10_000.0)))
    spec = decoder_spec(
        full,
        "modernbert",
        windows=_windows(config),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(config, "mlp_bias"),
        activation=activation_of(config, "hidden_activation", "gelu"),
        local_rope=local,
        tied=True,
        epsilon="norm_eps",
    )
    first, *others = spec.layers
    return replace(
        spec,
        layers=(replace(first, input_norm=False), *others),
        causal=False,
        embedding_norm=True,
        norm="layer_no_bias",
    )


def _windows(config: Config) -> list[int | None]:
    """To either side: half of `local_attention`, which counts both."""
    side = integer(config, "local_attention", 128) // 2
    if config.get("layer_types") is not None:
        return named_windows(config, side)
    period = integer(config, "global_attn_every_n_layers", 3)
    return [side if layer % period else None for layer in range(num_layers(config))]


def _rope(config: Config, kind: str, default_base: float) -> Config:
    """Of a type of layers: under its name (transformers 5), or `global_rope_theta` and `local_rope_theta` (before)."""
    named = config.get("rope_parameters") or {}
    given = (named.get(f"{kind}_attention") or {}) if isinstance(named, Mapping) else None
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters must hold an object for each layer type, found {shown(named)}")
    before = config.get("global_rope_theta" if kind == "full" else "local_rope_theta")
    theta = before if before is not None else default_base
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta, **given}}


_NAMES = Names(
    embedding="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    final_norm="model.final_norm",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
    norms=(("attn_norm", "input_norm"), ("mlp_norm", "mlp_norm")),
)
_HEAD = HeadForm(
    pooled="cls",
    out="classifier",
    out_bias=True,
    dense="head.dense",
    dense_bias=False,
    activation="gelu",
    norm="head.norm",
)
MODERNBERT = Family(
    "modernbert",
    "ModernBertModel",
    modernbert_spec,
    _NAMES.rows,
    ignored=("head.dense.weight", "head.norm.weight", "decoder.weight", "decoder.bias"),
    causal=False,
    heads={"ForSequenceClassification": _HEAD, "ForTokenClassification": replace(_HEAD, pooled="all")},
)
