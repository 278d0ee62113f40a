"""A causal language model as the transformers library has it, over a flat batch of tokens, with attention from outside.

The library's module is run as it is: for models that no family of ours covers. What is not token-wise in it must go
through the library's `AttentionInterface`, and nothing may mix tokens beside that: `check_token_wise` finds out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional as F

from engine.errors import UnsupportedModelError
from engine.models.fallback.experts import EXPERTS
from engine.models.fallback.probe import SeenLayer
from engine.models.fallback.rotation import fix_rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.models.decoder_layer import Attend

ATTENTION = "pageloom"
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class FallbackModel(nn.Module):
    """The interface of `engine.models.decoder.Decoder`."""

    attend: Attend

    def __init__(self, whole: PreTrainedModel, layers: Sequence[SeenLayer], max_position: int) -> None:
        """`layers`: what `probe` saw of a module of the same config; theirs are found by name here. `max_position`:
        positions that can come."""
        super().__init__()
        self.dtype: torch.dtype = whole.dtype
        self._size = int(whole.config.hidden_size)
        self._plain_head: nn.Module | None = None
        self.body = cast(nn.Module, whole.base_model)
        self.head = _without_body(whole)
        whole.set_attn_implementation(ATTENTION)
        if whole._can_set_experts_implementation():
            whole.set_experts_implementation(EXPERTS)
        for index, layer in enumerate(layers):
            whole.get_submodule(layer.name).pageloom_layer = index
        for module in self.modules():
            fix_rope(module, max_position)
        sinks = [whole.get_parameter(layer.sinks) for layer in layers if layer.sinks is not None]
        self.sinks = tuple(parameter.detach().float() for parameter in sinks)
        """of each layer that has them, for whoever supplies attention"""
        self.set_attention(_attention_not_set)

    def set_attention(self, attend: Attend) -> None:
        """Bind what computes attention: an operator while tracing, a function of the runner when eager."""
        object.__setattr__(self, "attend", attend)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] → [tokens, hidden_size], after the final norm."""
        states: torch.Tensor = self.body(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, attend=self.attend
        ).last_hidden_state
        return states[0]

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returns → float32 [rows, vocab_size]."""
        if self._plain_head is not None:
            return cast(torch.Tensor, self._plain_head(hidden)).float()
        return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """With all that the model's family does around the unembedding."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def find_plain_head(self, unembedding: nn.Module) -> None:
        """Spares each step the library's way to the logits where it leads to `unembedding` alone."""
        hidden = torch.randn(2, self._size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(next(self.parameters()))
        with torch.inference_mode():
            if torch.equal(self._logits(hidden), unembedding(hidden).float()):
                self._plain_head = unembedding

    def check_token_wise(self, vocab_size: int) -> None:
        """Raises UnsupportedModelError where a token's state depends on anything but its id and position although
        attention shows it no other: on its neighbours, or on its place in the batch."""
        device = next(self.parameters()).device
        places = torch.arange(8, device=device)
        kept = self.attend
        self.set_attention(_no_attention)
        with torch.inference_mode():
            ids, others = (7 * places + 11) % vocab_size, (5 * places + 13) % vocab_size
            others[1] = ids[4]
            found, again = self(ids, places)[4], self(others, places + 3)[1]
            default: torch.Tensor = self.body(
                input_ids=ids[None], use_cache=False, attend=self.attend
            ).last_hidden_state[0, 4]
        self.set_attention(kept)
        if max((found - other).abs().max() for other in (again, default)) > _TOLERANCE[self.dtype] * found.abs().max():
            raise UnsupportedModelError(
                "a token's state depends on more than its id, its position and attention (a recurrence, a convolution, "
                "attention of its own, or positions that do not count from 0), and nothing is kept for that"
            )


class _Given(nn.Module):
    """In the place of a model's body: what it is given is what it found."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Found:
        return _Found(inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Some keep their layers one module deeper (OPT)."""
        return self


class _Found(tuple[torch.Tensor]):
    """What a body returns, for a head that wants states alone."""

    def __new__(cls, states: torch.Tensor) -> _Found:
        return super().__new__(cls, (states,))

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _without_body(whole: PreTrainedModel) -> nn.Module:
    """The module that makes logits of a body's states, with all that its family does behind the unembedding."""
    head = copy.copy(whole)
    head._modules = {**whole._modules, whole.base_model_prefix: _Given()}
    return cast(nn.Module, head)


def _attention_not_set(*_: object) -> None:
    raise RuntimeError("FallbackModel.set_attention must be called before the first forward")


def _no_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    out.zero_()


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attend: Attend,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What `AttentionInterface` calls; shapes as in `probe`. Values that are narrower than keys are padded."""
    q, k, v = (_rows(heads) for heads in (query, key, value))
    width = v.size(-1)
    if width < q.size(-1):
        v = F.pad(v, (0, q.size(-1) - width))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    attend(q, k, v, out, cast(int, module.pageloom_layer))
    return out[..., :width][None], None


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, head_dim] → [tokens, heads, head_dim], copied only where a row has gaps."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    rows = heads[0].transpose(0, 1)
    no_gaps = rows.stride(2) == 1 and statically_known_true(rows.stride(1) == rows.size(2))
    return rows if no_gaps else rows.contiguous()
