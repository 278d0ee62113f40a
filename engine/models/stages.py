"""A stage's part of a model whose layers are divided: consecutive layers (GPipe, PipeDream). Torch-free.

The first stage has the embedding, the last one the final norm and the unembedding. Nothing is summed otherwise than in
the whole model, so its bits are the whole's.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.layer_groups import LayerGroup
from engine.models.families.rows import Rows
from engine.models.mixers import MixerSpec, StateSpec
from engine.models.sharding import Shard, Span, sharded
from engine.models.spec import DecoderSpec, layer_weights

_EMBEDDING, _UNEMBEDDING = "embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_LAST = ("norm.", "project_out.", "lm_head.")


class Stage(msgspec.Struct, frozen=True):
    """Which of how many."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def layers_of(spec: DecoderSpec, stage: Stage) -> Span:
    """So that the stage that costs most costs least. A unit of cost is a weight that every token meets; those of the
    unembedding count half, because only what samples meets them: all that decode, and few of a prompt."""
    costs = [layer_weights(spec, layer) for layer in spec.layers]
    head = spec.vocab_size * (spec.embedding_size or spec.hidden_size) // 2

    def firsts(limit: int) -> list[int] | None:
        """Where stages begin of which none costs more, the last one's first; None: that cannot be."""
        begins, end, cost = list[int](), len(costs), head
        for ahead in reversed(range(stage.count)):
            begin = end - 1
            cost += costs[begin]
            while begin > ahead and cost + costs[begin - 1] <= limit:
                begin -= 1
                cost += costs[begin]
            if cost > limit:
                return None
            begins.append(begin)
            end, cost = begin, 0
        return begins if end == 0 else None

    total = head + sum(costs)
    begins = firsts(bisect_left(range(total), True, key=lambda limit: firsts(limit) is not None))
    assert begins is not None
    places = [*reversed(begins), len(costs)]
    return Span(places[stage.index], places[stage.index + 1] - places[stage.index])


class StageLayers(NamedTuple):
    attending: Span
    """among the layers of the model that attend"""
    states: Span
    """among those that keep states"""


def stage_layers(spec: DecoderSpec | None, stages: int) -> tuple[StageLayers, ...]:
    """Of each stage; (): there is only one."""
    if spec is None or stages == 1:
        return ()
    attend = [not isinstance(layer.mixer, StateSpec) for layer in spec.layers]
    keep = [layer.state is not None for layer in spec.layers]
    found = []
    for own in (layers_of(spec, Stage(index, stages)) for index in range(stages)):
        spans = [Span(sum(of[: own.first]), sum(of[own.first : own.end])) for of in (attend, keep)]
        found.append(StageLayers(*spans))
    return tuple(found)


def stage_of(spec: DecoderSpec, stage: Stage, whole: DecoderSpec | None = None) -> DecoderSpec:
    """The model that a stage computes; of `whole`, where `spec` is a rank's part of it (`engine.models.sharding`):
    stages of all parts begin at the same layers. Raises ConfigError where there are fewer layers than stages,
    UnsupportedModelError for what is not divided so."""
    _check(spec, stage.count)
    own = layers_of(whole or spec, stage)
    layers = []
    for index in range(own.first, own.end):
        mixer = spec.layers[index].mixer
        if isinstance(mixer, MixerSpec) and mixer.shares is not None:
            if mixer.shares < own.first:
                raise UnsupportedModelError(
                    f"pipeline_parallel_size ({stage.count}): layer {index} reads the keys of layer {mixer.shares}, "
                    "which another stage has; use fewer stages, or tensor_parallel_size"
                )
            mixer = msgspec.structs.replace(mixer, shares=mixer.shares - own.first)
        layers.append(msgspec.structs.replace(spec.layers[index], mixer=mixer))
    part = msgspec.structs.replace(spec, layers=tuple(layers), begins=stage.is_first, ends=stage.is_last)
    if not stage.is_first:
        part = msgspec.structs.replace(
            part, tie_embeddings=False, embedding_norm=False, embedding_scale=None, position_offset=None
        )
    return part if stage.is_last else msgspec.structs.replace(part, final_norm=False)


def part_of(whole: DecoderSpec, shard: Shard | None, stage: Stage | None) -> DecoderSpec:
    """What a rank computes of a model: a part of each matrix, of the layers of a stage. Raises what both ways to divide
    it raise."""
    spec = whole if shard is None else sharded(whole, shard)
    return spec if stage is None else stage_of(spec, stage, whole)


def check_stages(spec: DecoderSpec | None, stages: int) -> None:
    """Raises what `stage_of` does, for any of them; `spec`: None of a model that has none."""
    if stages > 1 and spec is None:
        raise UnsupportedModelError(
            "pipeline_parallel_size: the layers of a model that runs through the library are not divided"
        )
    if stages > 1 and spec is not None:
        for index in range(stages):
            stage_of(spec, Stage(index, stages))


def _check(spec: DecoderSpec, stages: int) -> None:
    name = f"pipeline_parallel_size ({stages})"
    if stages > spec.num_layers:
        raise ConfigError(f"{name} exceeds the {spec.num_layers} layers of the model")
    if not spec.causal or spec.head is not None:
        raise UnsupportedModelError(f"{name}: an encoder, or a model that judges texts, is computed by one stage")
    if spec.layer_inputs is not None:
        raise UnsupportedModelError(f"{name}: inputs that each layer has of its own are not given to other stages")
    if spec.token_types:
        raise UnsupportedModelError(f"{name}: tokens of several kinds are not given to other stages")


def stage_rows(spec: DecoderSpec, stage: Stage, rows: dict[str, Rows]) -> dict[str, Rows]:
    """Of where the tensors of a whole model's checkpoint go, what is the stage's, in its own places."""
    own = layers_of(spec, stage)
    placed = {}
    for name, row in rows.items():
        parameter = _placed(spec, stage, own, row.parameter)
        if parameter is not None:
            placed[name] = msgspec.structs.replace(row, parameter=parameter)
    return placed


def _placed(spec: DecoderSpec, stage: Stage, own: Span, parameter: str) -> str | None:
    """None: it is another stage's."""
    found = _LAYER.fullmatch(parameter)
    if found is not None:
        index = int(found[1]) - own.first
        return f"layers.{index}.{found[2]}" if 0 <= index < own.count else None
    if parameter.startswith(_LAST):
        return parameter if stage.is_last else None
    if stage.is_first:
        return parameter
    return _UNEMBEDDING if parameter == _EMBEDDING and stage.is_last and spec.tie_embeddings else None


def stage_groups(groups: Sequence[LayerGroup], own: Span) -> tuple[LayerGroup, ...]:
    """The whole model's groups, because plans speak of these, with the layers that the stage has of each; it may have
    none. `own`: among those that attend."""
    return tuple(
        msgspec.structs.replace(
            group, layers=tuple(layer - own.first for layer in group.layers if own.first <= layer < own.end)
        )
        for group in groups
    )
