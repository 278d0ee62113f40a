"""Which of a model's matrices adapters may change, and what PEFT calls them."""

from __future__ import annotations

from typing import NamedTuple

from engine.adapters.config import LoRAConfig
from engine.models.families.registry import family_named
from engine.models.families.rows import Rows
from engine.models.mixers import MixerSpec
from engine.models.sharding import Shard
from engine.models.spec import DecoderSpec
from engine.models.stages import Stage, stage_rows
from engine.models.taken import Taken, shard_rows


class Part(NamedTuple):
    """One matrix of a checkpoint: some of the outputs of a linear layer of the decoder."""

    layer: str
    """the decoder's name of it"""
    number: int
    """which of the layer's parts"""
    rows: Rows


class Own(NamedTuple):
    """What a rank has of a part: some of its outputs, all over some of the inputs, or all of it."""

    layer: str
    """its own name of the layer"""
    number: int
    start: int
    """of these outputs, among the rank's of the layer"""
    outputs: int
    inputs: int
    taken: Taken
    """of the part"""


class Targets:
    """Of a model, whole. Torch-free."""

    def __init__(self, spec: DecoderSpec) -> None:
        family = family_named(spec.family)
        self.inputs = layers = _layers(spec)
        """of each layer: how many its product has"""
        self.parts: dict[str, list[Part]] = {}
        """by the decoder's layer, in the order of its outputs"""
        self.named: dict[str, Part] = {}
        """by the names that modules have in transformers; some have several"""
        named: dict[str, list[tuple[str, Rows]]] = {}
        for name, rows in family.weight_rows(spec).items():
            layer = rows.parameter.removesuffix(".weight")
            if name.endswith(".weight") and layer in layers:
                named.setdefault(layer, []).append((name.removesuffix(".weight"), rows))
        for layer, found in named.items():
            found.sort(key=lambda one: one[1].start)
            self.parts[layer] = [Part(layer, index, rows) for index, (_, rows) in enumerate(found)]
            for (name, _), part in zip(found, self.parts[layer], strict=True):
                bare = name.removeprefix(family.prefix)
                names = {name, bare, f"model.{bare}"}  # the last: where checkpoints call a module otherwise
                if family.wrapper is not None:
                    names.add(family.wrapper.name_of(name))
                self.named.update(dict.fromkeys(names, part))

    @property
    def values(self) -> int:
        """Numbers of an adapter of rank 1 that changes all."""
        sizes = ((len(parts) * self.inputs[layer], parts) for layer, parts in self.parts.items())
        return sum(inputs + sum(part.rows.count for part in parts) for inputs, parts in sizes)

    def find(self, module: str) -> Part | None:
        """By the name of the module in transformers; None: adapters do not change it here."""
        return self.named.get(module)

    @property
    def kinds(self) -> list[str]:
        """The last parts of the names, for messages."""
        return sorted({name.rpartition(".")[2] for name in self.named})


def own_parts(
    spec: DecoderSpec, targets: Targets, shard: Shard | None = None, stage: Stage | None = None
) -> dict[Part, Own]:
    """Of the model `spec`, in the order of each layer's outputs. A sum over ranks adds up what each of them makes of
    its inputs, so B (A x) needs none of its own."""
    named = {f"{part.layer} {part.number}": part for parts in targets.parts.values() for part in parts}
    rows, cut = {name: part.rows for name, part in named.items()}, dict[str, tuple[Taken, int]]()
    if shard is not None:
        rows, cut = shard_rows(spec, shard, rows)
    if stage is not None:
        rows = stage_rows(spec, stage, rows)
    found = {}
    for name, part in named.items():
        if (row := rows.get(name)) is not None:
            taken = cut[name][0] if name in cut else Taken()
            inputs = targets.inputs[part.layer] if taken.columns is None else taken.columns.count
            layer = row.parameter.removesuffix(".weight")
            found[part] = Own(layer, part.number, row.start, row.count, inputs, taken)
    return found


def table_bytes(
    spec: DecoderSpec,
    config: LoRAConfig,
    dtype_bytes: int,
    shard: Shard | None = None,
    stage: Stage | None = None,
    on_device: bool = False,
) -> int:
    """Of the factors that all slots have room for, and of those that are kept beside them, unless slots are
    `on_device` and these are not; a rank's of the model `spec`."""
    kept = config.max_loras + (0 if on_device else config.max_cpu_loras)
    values = sum(own.inputs + own.outputs for own in own_parts(spec, Targets(spec), shard, stage).values())
    return kept * config.max_lora_rank * values * dtype_bytes


def _layers(spec: DecoderSpec) -> dict[str, int]:
    """Projections of attention, and of MLPs that every token passes, with their inputs."""
    found: dict[str, int] = {}
    for index, layer in enumerate(spec.layers):
        name = f"layers.{index}"
        if isinstance(layer.mixer, MixerSpec):
            found |= {f"{name}.qkv_proj": spec.hidden_size, f"{name}.o_proj": layer.mixer.last_size}
        if layer.mlp is not None:
            found |= {f"{name}.gate_up_proj": spec.hidden_size, f"{name}.down_proj": layer.mlp.intermediate_size}
    return found
