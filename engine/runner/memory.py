"""What a step needs beside weights and KV: figures for the memory ledger, before the KV cache is sized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from engine.config import EngineConfig
from engine.layer_groups import LayerGroup
from engine.machine import main_memory
from engine.models.decoder import Decoder
from engine.models.facts import ModelFacts
from engine.models.step_memory import draft_bytes, estimate_step_bytes, logits_bytes, replayed_bytes
from engine.reports import LoadReport
from engine.runner.loading import CausalModel, RunnerParts, device_of
from engine.runner.paged_attention import PagedAttention
from engine.runner.state_caches import StateCaches


def activation_bytes(config: EngineConfig, parts: RunnerParts, states: StateCaches | None) -> int:
    """A step's peak in bytes, a draft's included: measured on a CUDA device, else estimated."""
    draft = None if parts.draft is None else parts.draft.facts
    if (device := device_of(config)).type == "cuda":
        tokens, samples = config.scheduler.max_num_batched_tokens, config.scheduler.max_sampled
        own = measure_activation_bytes(parts.model, parts.facts, device, tokens, samples, states)
        own += replayed_bytes(parts.facts, parts.dtype.itemsize, config.scheduler)
        return own if draft is None else own + draft_bytes(draft, parts.dtype.itemsize, tokens, samples)
    return estimate_step_bytes(
        config,
        parts.facts,
        makes_logits=parts.stage is None or parts.stage.after is None,
        whole=None if parts.context is None else parts.context.whole,
        exchanged=parts.model.spec if parts.exchange is not None and isinstance(parts.model, Decoder) else None,
        draft=draft,
    )


def load_report(
    config: EngineConfig,
    parts: RunnerParts,
    attention: PagedAttention,
    groups: Sequence[LayerGroup],
    table_bytes: int,
    graph_bytes: int,
    memory_before: tuple[int, int],
) -> LoadReport:
    """`table_bytes`: of what a runner keeps beside weights and KV; `memory_before`: (total, free) bytes of the device
    before the parts were loaded."""
    return LoadReport(
        weight_bytes=parts.weight_bytes + (parts.draft.weight_bytes if parts.draft else 0),
        activation_bytes=activation_bytes(config, parts, attention.states),
        workspace_bytes=table_bytes + attention.workspace_bytes(config.scheduler.max_sampled),
        graph_bytes=graph_bytes,
        block_bytes=attention.block_bytes(config.cache.block_size),
        windows=tuple(group.window for group in groups),
        device_bytes_total=memory_before[0],
        device_bytes_free=memory_before[1],
        attention_backend=parts.backend.name,
        exact_lengths=parts.backend.needs_host_lengths,
    )


def measure_activation_bytes(
    model: CausalModel,
    facts: ModelFacts,
    device: torch.device,
    max_tokens: int,
    max_samples: int,
    states: StateCaches | None,
) -> int:
    """Peak of a real step at the full budget on a CUDA device, with attention left out: its workspace is the backend's.
    Layers that keep states compute one prompt, then one beside as many sequences as decode at once.

    Leaves the model with a stand-in for attention and states; the caller binds the real ones.
    """
    model.set_attention(lambda q, k, v, out, layer: _fill_with_zero(out))
    ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        if states is not None:
            cast(Decoder, model).set_mixing(states.forgetful([max_tokens], device))
        hidden = model(ids, ids)
        model.compute_logits(hidden[:max_samples])
        if states is not None:
            decodes = min(max_samples, max_tokens) - 1
            cast(Decoder, model).set_mixing(states.forgetful([max_tokens - decodes, *[1] * decodes], device))
            model(ids, ids)
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    return max(peak, 0) + logits_bytes(facts.vocab_size, min(max_samples, max_tokens))


def _fill_with_zero(out: torch.Tensor) -> None:
    out.zero_()


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the device; on CPU what the machine, or the control group around it, grants."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total), int(free)
    return main_memory()
