"""What a model of the library does with tokens, found by running its module on the meta device, where nothing is
computed: which layers mix tokens, with what heads, windows and scales.

Its attention is replaced through the library's `AttentionInterface`, its masks through `AttentionMaskInterface`. A
mask's window is read from the rule that would have filled it, so that what the config calls it does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.errors import UnsupportedModelError
from engine.models.facts import HeadsSpec
from engine.models.fallback.experts import EXPERTS, experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "pageloom_probe"
_TOKENS = 5
_SHOWN = 300
"""characters of an error of the library's"""
_QUERIES = (3, 1000, 1 << 20)
"""positions at which a mask's rule is asked what they see"""
_LONGEST = _QUERIES[-1]
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "max_length_k",
        "max_length_q",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "sliding_window",
        "softcap",
        "s_aux",
        "use_cache",
    }
)
"""what models tell an attention function beside q, k, v, mask and scale; all else would have to be computed"""


@dataclass(frozen=True)
class SeenLayer:
    name: str
    """of its attention's module in the whole model"""
    heads: HeadsSpec
    sinks: str | None
    """the parameter's name in the whole model"""


@dataclass
class _Probe:
    """Given down to every layer with the call, as the library passes on what it does not know."""

    names: dict[int, str]
    """of modules and parameters, by identity"""
    layers: list[SeenLayer] = field(default_factory=list)


def probe(whole: PreTrainedModel) -> list[SeenLayer]:
    """Every attention of one forward pass, in order. Raises UnsupportedModelError: the model cannot be run so, or does
    what no attention backend does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    ExpertsInterface.register(EXPERTS, experts)
    named = (*whole.named_modules(), *whole.named_parameters())
    seen = _Probe({id(each): name for name, each in named})
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    kept = whole.config._attn_implementation
    whole.set_attn_implementation(_NAME)
    if whole._can_set_experts_implementation():
        whole.set_experts_implementation(EXPERTS)
    try:
        with torch.no_grad():
            whole.base_model(
                input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids, use_cache=False, probe=seen
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:_SHOWN]
        raise UnsupportedModelError(f"its module does not run with attention from outside: {reason}") from error
    finally:
        whole.set_attn_implementation(kept)
    return seen.layers


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    probe: _Probe | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, tokens, head_dim]; key, value [1, kv_heads, tokens, head_dim or less]."""
    name = type(module).__name__
    if probe is None:
        raise UnsupportedModelError(f"{name} keeps from its attention what the model is called with")
    if unknown := sorted(key for key, value in told.items() if key not in _HARMLESS and value is not None):
        raise UnsupportedModelError(f"{name} gives its attention {', '.join(unknown)}, which no backend takes")
    if told.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"the attention of {name} is not causal")
    head_dim = query.size(-1)
    if key.size(-1) != head_dim or value.size(-1) > head_dim or key.size(2) != _TOKENS:
        raise UnsupportedModelError(f"{name} attends with keys of another shape than its queries")
    sinks = told.get("s_aux")
    heads = HeadsSpec(
        num_heads=query.size(1),
        num_kv_heads=key.size(1),
        head_dim=head_dim,
        scale=float(head_dim**-0.5 if scaling is None else scaling),
        window=_window_of(attention_mask, name),
        soft_cap=told.get("softcap"),
        sinks=sinks is not None,
    )
    probe.layers.append(SeenLayer(probe.names[id(module)], heads, None if sinks is None else probe.names[id(sinks)]))
    return query.new_empty(1, _TOKENS, query.size(1), value.size(-1)), None


def _window_of(mask: torch.Tensor | None, name: str) -> int | None:
    window: int | str | None = getattr(mask, "window", "unknown")
    if isinstance(window, str):
        raise UnsupportedModelError(f"what a token of {name} sees is neither all before it nor a window: {window}")
    return window


def _mask(q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_: Any) -> torch.Tensor:
    """Stands for the library's: no mask, but what it would show."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.window = _rule(mask_function)  # type: ignore[attr-defined]
    return mask


def _rule(visible: Callable[..., torch.Tensor]) -> int | str | None:
    """The window of a rule (batch, head, query, key) -> whether it is seen; None: everything before; text: another."""
    zero, keys = torch.zeros((), dtype=torch.int64), torch.arange(_LONGEST + 2)
    seen = [visible(zero, zero, torch.tensor(query), keys).expand(len(keys)) for query in _QUERIES]
    window = int(seen[-1].sum())
    for query, found in zip(_QUERIES, seen, strict=True):
        if not torch.equal(found.bool(), (keys <= query) & (keys > query - window)):
            return f"at position {query} it sees {int(found.sum())} keys"
    return None if window > _LONGEST else window
