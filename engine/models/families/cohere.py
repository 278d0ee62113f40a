"""Command R and R7B (Cohere 1 and 2): attention and MLP side by side behind one LayerNorm without bias, heads that turn
in neighbouring pairs, scaled logits. Cohere 2 has a window on three of four layers, and turns in those alone."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    alternating_windows,
    decoder_spec,
    flag,
    integer,
    num_layers,
    number,
    refuse,
    with_defaults,
)
from engine.models.families.names import Names
from engine.models.spec import DecoderSpec


def cohere_spec(config: Config) -> DecoderSpec:
    return _spec(with_defaults(config, rope_theta=5e5), "cohere", [None] * num_layers(config))


def cohere2_spec(config: Config) -> DecoderSpec:
    windows = alternating_windows(config, 4096, period=integer(config, "sliding_window_pattern", 4))
    return _spec({**config, "head_dim": None}, "cohere2", windows, [window is not None for window in windows])


def _spec(config: Config, family: str, windows: list[int | None], turned: list[bool] | None = None) -> DecoderSpec:
    refuse(config, {"use_qk_norm": "there are no norms of q and k"})
    bias = flag(config, "attention_bias")
    spec = decoder_spec(
        with_defaults(config, layer_norm_eps=1e-5),
        family,
        windows=windows,
        turned=turned,
        qkv_bias=bias,
        o_bias=bias,
        tied=True,
        epsilon="layer_norm_eps",
    )
    return replace(spec, norm="layer_no_bias", parallel="one_norm", logit_scale=number(config, "logit_scale", 0.0625))


COHERE_NAMES = Names(qkv_stored="pairs")
COHERE = Family("cohere", "CohereForCausalLM", cohere_spec, COHERE_NAMES.rows)
COHERE2 = Family("cohere2", "Cohere2ForCausalLM", cohere2_spec, COHERE_NAMES.rows)
