"""Rotary embeddings of a library's module that look at the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LOOKING = ("dynamic", "longrope")


def looks_at_length(config: Any) -> bool:
    """Of a library's config, whose layer types may have ropes of their own."""
    told = getattr(config, "rope_parameters", None) or {}
    ropes = [told, *(each for each in told.values() if isinstance(each, Mapping))]
    return any(rope.get("rope_type") in _LOOKING for rope in ropes)


def fix_rope(module: Any, max_position: int) -> None:
    """A rule that looks at the positions of a batch becomes that of the longest sequence that can come: a token's
    rotation must not depend on its neighbours, or cached keys would not fit. `module`: any; others are left alone."""
    told = getattr(module, "rope_type", None)
    kinds = told if isinstance(told, Mapping) else {None: told}
    if not any(kind in _LOOKING for kind in kinds.values()):
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for layer_type, kind in kinds.items():
        if kind not in _LOOKING:
            continue
        prefix = "" if layer_type is None else f"{layer_type}_"
        frequencies = getattr(module, f"{prefix}inv_freq")
        rule = ROPE_INIT_FUNCTIONS[kind]
        found, scaling = rule(module.config, frequencies.device, seq_len=max_position, layer_type=layer_type)
        frequencies.copy_(found)
        setattr(module, f"{prefix}attention_scaling", scaling)
    fixed = {layer_type: "default" if kind in _LOOKING else kind for layer_type, kind in kinds.items()}
    module.rope_type = fixed if isinstance(told, Mapping) else "default"
