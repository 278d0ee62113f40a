"""EXAONE 4: norms behind attention and MLP only, within the residual, and over each head of q and k. The larger model
has a window on three of four layers, and turns in those alone."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import (
    Config,
    Family,
    alternating_windows,
    decoder_spec,
    integer,
    num_layers,
    with_defaults,
)
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def exaone4_spec(config: Config) -> DecoderSpec:
    windows: list[int | None] = [None] * num_layers(config)
    turned = [True] * len(windows)
    if config.get("sliding_window", 4096) is not None:
        windows = alternating_windows(config, 4096, period=_period(config))
        turned = [window is not None for window in windows]
    spec = decoder_spec(
        with_defaults(config, rms_norm_eps=1e-5),
        "exaone4",
        windows=windows,
        turned=turned,
        qk_norm="head",
        default_kv_heads=32,
    )
    return replace(spec, norm_placement="inside")


def _period(config: Config) -> int:
    """A number, or as text one letter for each layer of a period ("LLLG"), which `layer_types` says, too."""
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str) and config.get("layer_types") is not None:
        return len(pattern)
    return integer(config, "sliding_window_pattern", 4)


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", exaone4_spec, LLAMA_NAMES.rows)
