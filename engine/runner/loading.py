"""From a configuration to what a runner is built of: weights in a model, and an attention backend that can serve it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import nn

from attention_backends.bidirectional import BidirectionalAttention
from attention_backends.interface import AttentionBackend
from attention_backends.registry import NoBackendError, select
from attention_backends.toolchain import BuildError
from compilation.graphs import dispatcher
from engine.adapters.tables import AdapterTables
from engine.config import CompileMode, EngineConfig, GraphMode
from engine.cpu_kernels.linear import load as load_linear_ops
from engine.cpu_kernels.reading import choose_reading
from engine.errors import ConfigError, EngineError
from engine.kv_budget import sequence_sizes
from engine.layer_groups import LayerGroup, State, group_layers
from engine.machine import release_free_memory
from engine.models.decoder import Decoder
from engine.models.description import ModelDescription, describe
from engine.models.drafts import DraftDescription
from engine.models.expert_exchange import ExpertExchange, join_experts
from engine.models.facts import ModelFacts
from engine.models.fallback.division import divided_facts
from engine.models.fallback.model import FallbackModel
from engine.models.head import Head
from engine.models.linear_choice import choose_linears
from engine.models.parallel import join
from engine.models.sharding import Shard, sharded
from engine.models.spec import DecoderSpec
from engine.models.stages import Stage, part_of, stage_groups, stage_layers, stage_of
from engine.parallel.group import ContextRanks, Group
from engine.parallel.stage_group import StageGroup
from engine.parallel.stage_link import LinkEnd, StateLink
from engine.runner.context import ContextGroup
from engine.runner.drafts import DraftParts, check_backend, draft_of, load_draft
from engine.runner.invariance import check_facts, make_invariant
from engine.runner.preflight import check_device
from engine.weights.device_packing import DevicePacker
from engine.weights.fallback_loader import load_fallback
from engine.weights.forms import weight_forms
from engine.weights.loader import load_weights, weight_bytes
from engine.weights.packing import Packer

logger = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""(q, k, v, out, layer index), as `pageloom::attention`"""


def graph_mode(
    asked: GraphMode, compile_mode: CompileMode, backend: AttentionBackend, facts: ModelFacts
) -> dispatcher.GraphMode:
    """`auto` becomes all that the compile mode, the attention backend and the model's layers allow.

    Raises ConfigError for a mode that captures what is not capture-safe.
    """
    capture_safe = is_capture_safe(backend, facts)
    if asked == "auto":
        if compile_mode == "pieces":
            return "both" if capture_safe else "piecewise"
        return "full_decode" if capture_safe else "none"
    if asked in ("full_decode", "both") and not capture_safe:
        instead = repr("piecewise" if compile_mode == "pieces" else "none")
        if facts.states:
            raise ConfigError(
                f"graphs={asked!r} captures whole steps, but layers of {facts.family} keep states, which are found on "
                f"the host; use graphs={instead}"
            )
        raise ConfigError(
            f"graphs={asked!r} captures attention, but attention backend {backend.name!r} is not capture-safe; "
            f"use graphs={instead} or another attention_backend"
        )
    return asked


def is_capture_safe(backend: AttentionBackend, facts: ModelFacts) -> bool:
    """Whether a graph can hold a whole step."""
    return backend.capabilities().capture_safe and not facts.states


class CausalModel(Protocol):
    """What a runner asks of a model; it must also be an `nn.Module`."""

    def set_attention(self, attend: Attend) -> None: ...

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [n], int64 [n] → hidden states [n, hidden_size]."""
        ...

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden_size] → [m, size of an embedding]: what logits are made of, and prompts are pooled from."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden_size] → float32 [m, vocab_size], fresh memory."""
        ...


def compilable(model: CausalModel) -> nn.Module:
    """Raises EngineError."""
    if not isinstance(model, nn.Module):
        name = type(model).__name__
        raise EngineError(f"{name} is no nn.Module, so it cannot be compiled: set compile to none")
    return model


def _packer(config: EngineConfig, dtype: torch.dtype) -> Packer | DevicePacker | None:
    """None where nothing is to be packed, or on a CPU the kernels cannot be built: then dense layers serve, slowly.

    Raises ConfigError where that would not do what was asked for.
    """
    device = device_of(config)
    if device.type == "cuda":
        quantization = config.model.quantization
        return None if quantization == "none" else DevicePacker(quantization, dtype, device)
    if dtype != torch.bfloat16:
        return None
    try:
        ops = load_linear_ops(Path(config.compile.cache_dir))
    except BuildError as error:
        if config.model.quantization in ("int8", "int4", "fp8"):
            raise ConfigError(f"quantization={config.model.quantization!r} needs compiled kernels: {error}") from error
        logger.warning("linear layers run through the library, slowly: %s", error)
        return None
    return Packer(ops, config.model.quantization, adapts=config.lora is not None)


def _compute_states_natively(model: Decoder, config: EngineConfig) -> None:
    if device_of(config).type != "cpu" or not model.mixing:
        return
    try:
        ops = load_linear_ops(Path(config.compile.cache_dir))
    except BuildError as error:
        logger.warning("layers that keep states run through the library, slowly: %s", error)
        return
    for layer in model.mixing:
        layer.compute_by(ops)


class StageParts(NamedTuple):
    """What a rank has that computes a stage of a model."""

    groups: tuple[LayerGroup, ...]
    """of the whole model, with the stage's layers"""
    before: StateLink | None
    after: StateLink | None


@dataclass(frozen=True)
class RunnerParts:
    model: CausalModel
    facts: ModelFacts
    dtype: torch.dtype
    """of weights and activations"""
    backend: AttentionBackend
    weight_bytes: int
    sinks: tuple[torch.Tensor, ...] = ()
    """of each layer that has them"""
    latents: tuple[torch.Tensor, ...] = ()
    """what makes keys and values of them, of each layer that keeps them"""
    draft: DraftParts | None = None
    state: State | None = None
    """of a model, of which this may be a part, that has layers which keep one"""
    head: Head | None = None
    """of a model that judges prompts"""
    group: Group | None = None
    """of ranks, of whose model this is a part"""
    stage: StageParts | None = None
    """which it is, where those are stages"""
    context: ContextGroup | None = None
    """of ranks that divide positions, not heads, of keys and values"""
    exchange: ExpertExchange | None = None
    """of replicas, over which experts are divided"""
    adapters: AdapterTables | None = None


def device_of(config: EngineConfig) -> torch.device:
    if config.device.kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", config.device.index)


def load_parts(config: EngineConfig, group: Group | None = None, replicas: Group | None = None) -> RunnerParts:
    """Read the model's description, build it, fill it, choose its attention backend. `group`: of ranks that compute
    the model together, each its part. `replicas`: over which experts are divided, and nothing else.

    Raises what the model, weight and attention rooms raise: ConfigError, UnsupportedModelError, WeightsError. On CUDA
    also what the preflight finds missing, before anything else takes time.
    """
    device = device_of(config)
    if device.type == "cuda":
        check_device(config, device)
    description = describe(config.model.path, config.model.model_impl)
    spec, facts = description.spec, description.facts
    place = _place(config, group, replicas)
    if group is not None or replicas is not None:
        spec, facts = _part(description, place)
    draft = draft_of(config, description)
    if draft is not None and draft.shown_layers and description.spec is None:
        raise ConfigError("speculative_config: an EAGLE-3 head needs a model that runs natively; use method 'ngram'")
    # The backend first: that none fits, or not the graphs, is known in a moment, weights take seconds. Ranks have the
    # same one, so the whole model is asked.
    backend = _backend(config, description.facts, draft, device)
    graphs = graph_mode(config.compile.graphs, config.compile.mode, backend, facts)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    packer = _packer(config, dtype)
    shown_layers = () if draft is None else draft.shown_layers
    if spec is None:
        model: Decoder | FallbackModel = _library_model(config, description, packer, group)
    else:
        model = _filled(config, description, spec, shown_layers, packer, place)
    how = "natively" if spec is not None else "through the transformers library's module"
    logger.info("%s runs %s; weights: %s", facts.family, how, weight_forms(model))
    on_host = packer if isinstance(packer, Packer) else None
    if on_host is not None:
        choose_reading(on_host.ops, weight_bytes(model), Path(config.compile.cache_dir))
    draft_parts = None if draft is None else load_draft(config, draft, model, on_host)
    exchange = None if replicas is None else _exchange(config, model, replicas, dtype)
    adapters = _adapters(config, model, description.spec, device, place)
    if config.device.batch_invariant:
        make_invariant(model, packer, device)
    release_free_memory()
    if device.type == "cuda" and graphs != "none":  # without graphs the host sets the pace, not the kernels
        choose_linears(model, Path(config.compile.cache_dir))
    return RunnerParts(
        model=model,
        facts=facts,
        dtype=dtype,
        backend=backend,
        weight_bytes=weight_bytes(model) + (adapters.kept_bytes if adapters is not None else 0),
        sinks=model.sinks,
        latents=model.latents if isinstance(model, Decoder) else (),
        draft=draft_parts,
        state=sequence_sizes(config, description, None if draft is None else draft.facts).state,
        head=model.head if isinstance(model, Decoder) else None,
        group=group,
        stage=_stage_parts(config, description.spec, group, dtype) if isinstance(group, StageGroup) else None,
        context=_context_group(config, description.facts, group),
        exchange=exchange,
        adapters=adapters,
    )


def _exchange(
    config: EngineConfig, model: Decoder | FallbackModel, replicas: Group, dtype: torch.dtype
) -> ExpertExchange:
    assert isinstance(model, Decoder) and config.parallel.experts is not None
    exchange = ExpertExchange(replicas, dtype, len(model.spec.layers))
    join_experts(model, exchange, config.parallel.experts, replicas.size)
    if config.parallel.eplb is not None:
        exchange.move(config.parallel.eplb)
    return exchange


def _adapters(
    config: EngineConfig,
    model: Decoder | FallbackModel,
    whole: DecoderSpec | None,
    device: torch.device,
    place: _Place,
) -> AdapterTables | None:
    if config.lora is None:
        return None
    assert isinstance(model, Decoder) and whole is not None  # resolving refuses others
    _, shard, stage = place
    return AdapterTables(model, whole, config.lora, config.scheduler.max_num_batched_tokens, device, shard, stage)


_Place = tuple[Group | None, Shard | None, Stage | None]
"""with whom a rank computes the same layers, its part of their matrices, and which layers these are"""


def _place(config: EngineConfig, group: Group | None, replicas: Group | None = None) -> _Place:
    if replicas is not None:
        return None, Shard(replicas.rank, replicas.size, config.parallel.experts, only_experts=True), None
    parts = group.parts if isinstance(group, StageGroup) else group
    shard = None if parts is None else Shard(parts.rank, parts.size, config.parallel.experts)
    return parts, shard, group.stage if isinstance(group, StageGroup) else None


def _context_group(config: EngineConfig, whole: ModelFacts, group: Group | None) -> ContextGroup | None:
    if config.parallel.context == 1 or group is None:
        return None
    return ContextGroup(whole, cast(ContextRanks, group))  # of CPUs, as resolving knows


def _part(description: ModelDescription, place: _Place) -> tuple[DecoderSpec | None, ModelFacts]:
    """Of the described model what a rank computes."""
    _, shard, stage = place
    whole = description.spec
    if whole is None:
        assert shard is not None and stage is None  # resolving refuses it
        return None, divided_facts(description.path, shard)
    spec = part_of(whole, shard, stage)
    return spec, spec.facts


def _stage_parts(config: EngineConfig, whole: DecoderSpec | None, group: StageGroup, dtype: torch.dtype) -> StageParts:
    assert whole is not None
    slots, most_tokens = config.scheduler.steps_in_flight, config.scheduler.max_num_batched_tokens

    def link(end: LinkEnd | None) -> StateLink | None:
        return None if end is None else end.open(slots, most_tokens, whole.hidden_size, dtype)

    _, shard, _ = _place(config, group)
    kept = (whole if shard is None else sharded(whole, shard)).facts.kept
    groups = group_layers(kept, config.model.max_model_len)
    own = stage_layers(whole, group.stage.count)[group.stage.index].attending
    return StageParts(stage_groups(groups, own), link(group.before), link(group.after))


def _backend(
    config: EngineConfig, facts: ModelFacts, draft: DraftDescription | None, device: torch.device
) -> AttentionBackend:
    if config.device.batch_invariant:
        check_facts(facts, config.device.kind)
    if not facts.keeps_kv:
        if config.device.attention_backend is not None:
            raise ConfigError("attention_backend is of models that keep keys and values; leave it out for an encoder")
        return BidirectionalAttention()
    layers = [*facts.layers, *(() if draft is None else draft.facts.layers)]
    try:
        selection = select(
            device=device,
            dtype=getattr(torch, config.model.dtype),
            head_dims=[layer.head_dim for layer in layers if layer.latent is None],
            block_size=config.cache.block_size // config.parallel.context,
            needs_window=any(layer.window is not None for layer in layers),
            needs_soft_cap=any(layer.soft_cap is not None for layer in layers),
            name=config.device.attention_backend,
            cache_dir=Path(config.compile.cache_dir),
            kv_dtype=getattr(torch, config.cache.dtype),
            needs_sinks=any(layer.sinks for layer in layers),
            needs_chunk=any(layer.chunk is not None for layer in layers),
            needs_latent=any(layer.latent is not None for layer in layers),
            needs_parts=config.parallel.context > 1,
            needs_invariant=config.device.batch_invariant,
        )
    except NoBackendError as error:
        raise ConfigError(str(error)) from error
    if draft is not None:
        check_backend(selection.backend, device)
    return selection.backend


def _library_model(
    config: EngineConfig, description: ModelDescription, packer: Packer | DevicePacker | None, group: Group | None
) -> FallbackModel:
    assert not isinstance(packer, DevicePacker)  # resolving refuses it
    settings = config.model
    return load_fallback(
        description,
        dtype=getattr(torch, settings.dtype),
        device=device_of(config),
        max_position=settings.max_model_len,
        dummy=settings.load_format == "dummy",
        seed=settings.seed,
        packer=packer,
        group=group,
    )


def _filled(
    config: EngineConfig,
    description: ModelDescription,
    spec: DecoderSpec,
    shown_layers: Sequence[int],
    packer: Packer | DevicePacker | None,
    place: _Place,
) -> Decoder:
    """The model with its weights; of the described one the part that is `spec`, where that is not all."""
    parts, shard, stage = place
    settings, device = config.model, device_of(config)
    dtype, length = getattr(torch, settings.dtype), settings.max_model_len
    if isinstance(packer, DevicePacker):
        device = torch.device("cpu")  # what it packs goes to the GPU matrix by matrix
    model = Decoder(spec, dtype=dtype, device=device, max_position=length, shown_layers=shown_layers)
    how, seed = settings.load_format, settings.seed
    load_weights(model, description, load_format=how, seed=seed, packer=packer, shard=shard, stage=stage)
    if parts is not None:
        assert description.spec is not None
        join(model, description.spec if stage is None else stage_of(description.spec, stage), parts)
    _compute_states_natively(model, config)  # behind that, which may take norms away
    return model
