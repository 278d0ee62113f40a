"""What stands in the places of a model's attention and of its states: functions of the runner, or the operators at
which a trace is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from attention_backends.op import ATTENTION_OP
from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.models.expert_exchange import EXCHANGE_OP, ExpertExchange
from engine.models.state_op import STATE_OP
from engine.runner.loading import CausalModel, RunnerParts
from engine.runner.paged_attention import PagedAttention
from engine.runner.state_caches import StateCaches


def state_caches(parts: RunnerParts) -> StateCaches | None:
    """Of a model, or a stage of one, that has layers with states."""
    if not parts.facts.states:
        return None
    if parts.state is None:
        raise EngineError("layers keep states, and nothing is said of where")
    return StateCaches(cast(Decoder, parts.model).mixing, parts.dtype, parts.state)


def bind(model: CausalModel, attention: PagedAttention) -> None:
    """For steps that run the model itself."""
    model.set_attention(attention.attend)
    if attention.states is not None:
        cast(Decoder, model).set_mixing(attention.states.mix)


def mark(model: CausalModel, attention: PagedAttention) -> None:
    """For a trace."""
    model.set_attention(torch.ops.pageloom.attention)
    if attention.states is not None:
        cast(Decoder, model).set_mixing(torch.ops.pageloom.mix_states)


def bound_ops(attention: PagedAttention, exchange: ExpertExchange | None) -> dict[str, Callable[..., Any]]:
    """What each operator of such a trace is."""
    bound: dict[str, Callable[..., Any]] = {ATTENTION_OP: attention.attend}
    if exchange is not None:
        bound[EXCHANGE_OP] = exchange.compute
    if attention.states is not None:
        bound[STATE_OP] = attention.states.mix
    return bound
