"""Which of a model's matrices adapters may change, and what PEFT calls them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from engine.adapters.config import BLOCK, LoRAConfig
from engine.models.families.registry import family_named
from engine.models.families.rows import Rows
from engine.models.mixers import MixerSpec
from engine.models.sharding import Shard
from engine.models.spec import DecoderSpec, ExpertsSpec
from engine.models.stages import Stage, stage_rows
from engine.models.taken import Taken, shard_rows

_BEHIND = ".base_layer"
"""PEFT's, of what is changed twice"""
_LAYER = re.compile(r".*?layers\.\d+")
_CALLED = ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts", "mixer.experts")
"""the experts of a layer, by releases of transformers that call them otherwise than checkpoints do"""
_DIGITS = 9
_MATRICES = {
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", -1),
    "down_proj": ("down", 0),
    "w1": ("gate_up", 0),
    "w3": ("gate_up", -1),
    "w2": ("down", 0),
}
"""what the matrices of an expert are called, each with the parameter that it is in, and which of its parts it is"""


class Part(NamedTuple):
    """One matrix of a checkpoint: some of the outputs of a linear layer of the decoder, or of an expert's."""

    layer: str
    """the decoder's name of it, of an expert's with its number behind: `layers.0.experts.gate_up.7`"""
    number: int
    """which of the layer's parts"""
    rows: Rows


class Stack(NamedTuple):
    """The experts of a layer, whose matrices transformers holds in two tensors."""

    spec: ExpertsSpec
    parts: list[list[Part]]
    """by expert: of its gate, if it has one, of what is up, and of what is down"""
    first: Rows | None
    """how a checkpoint's tensor holds gate with up, where it does"""


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
    """Of a model, whole, as far as `config` has room for them. Torch-free."""

    def __init__(self, spec: DecoderSpec, config: LoRAConfig) -> None:
        self._family = family = family_named(spec.family)
        self._config = config
        self.inputs = layers = _layers(spec)
        """of each layer: how many its product has"""
        self.parts: dict[str, list[Part]] = {}
        """by the decoder's layer, in the order of its outputs"""
        self.named: dict[str, Part] = {}
        """by the names that modules have in transformers; some have several"""
        self._stacks: dict[str, Stack] = {}
        named: dict[str, list[tuple[str, Rows]]] = {}
        all_rows = family.weight_rows(spec)
        for name, rows in all_rows.items():
            layer = rows.parameter.removesuffix(".weight")
            if name.endswith(".weight") and layer in layers:
                named.setdefault(layer, []).append((name.removesuffix(".weight"), rows))
        for layer, found in named.items():
            found.sort(key=lambda one: one[1].start)
            self.parts[layer] = [Part(layer, index, rows) for index, (_, rows) in enumerate(found)]
            for (name, _), part in zip(found, self.parts[layer], strict=True):
                self.named.update(dict.fromkeys(self._names(name), part))
        self.has_experts = any(layer.experts is not None for layer in spec.layers)
        if config.max_lora_expert_rank:
            self._add_experts(spec, all_rows)

    def _add_experts(self, spec: DecoderSpec, all_rows: Mapping[str, Rows]) -> None:
        """Their matrices have no modules of their own in transformers, and names of many kinds."""
        stacks: dict[str, Stack] = {}
        for index, layer in enumerate(spec.layers):
            if (experts := layer.experts) is not None:
                name = f"layers.{index}.experts"
                parts = [_of_expert(experts, spec.hidden_size, name, expert) for expert in range(experts.count)]
                for part in (part for of_one in parts for part in of_one):
                    self.parts.setdefault(part.layer, []).append(part)
                    is_first = part.rows.parameter.endswith("gate_up")
                    self.inputs[part.layer] = spec.hidden_size if is_first else experts.inner_size
                stacks[name] = Stack(experts, parts, None)
        for name, rows in all_rows.items():
            parameter, _, kind = rows.parameter.rpartition(".")
            if kind != "gate_up" or rows.expert is None or rows.expert not in (0, "all"):
                continue
            if rows.expert == "all":
                stacks[parameter] = stacks[parameter]._replace(first=rows)
            container = name.removesuffix(".weight").rpartition(".")[0].removesuffix(".0")
            of_layer = _LAYER.match(container)
            others = () if of_layer is None else tuple(f"{of_layer[0]}.{each}" for each in _CALLED)
            for called in (container, *others):
                self._stacks.update(dict.fromkeys(self._names(called), stacks[parameter]))

    def most_rank(self, part: Part) -> int:
        return self._config.max_lora_rank if part.rows.expert is None else self._config.max_lora_expert_rank

    @property
    def most_values(self) -> int:
        """Numbers of an adapter of the largest ranks that changes all."""
        parts = (part for of_layer in self.parts.values() for part in of_layer)
        return sum(self.most_rank(part) * (self.inputs[part.layer] + part.rows.count) for part in parts)

    def find(self, module: str) -> Part | None:
        """By the name of the module in transformers, or, of an expert, in checkpoints; None: adapters do not change
        it here."""
        if (part := self.named.get(module)) is not None:
            return part
        of_expert, _, matrix = module.rpartition(".")
        experts, _, number = of_expert.rpartition(".")
        stack = self._stacks.get(experts)
        if stack is None or matrix not in _MATRICES:
            return None
        if not (number.isascii() and number.isdigit()) or len(number) > _DIGITS or int(number) >= len(stack.parts):
            return None
        kind, which = _MATRICES[matrix]
        of_kind = [part for part in stack.parts[int(number)] if part.rows.parameter.endswith(f".{kind}")]
        is_there = len(of_kind) > 1 or matrix not in ("gate_proj", "w1")
        return of_kind[which] if is_there or kind == "down" else None

    @property
    def has_stacks(self) -> bool:
        """There is room for what changes experts."""
        return bool(self._stacks)

    def find_stack(self, module: str) -> Stack | None:
        """By the name of the module of all of a layer's experts, which a file has again for its other tensors."""
        return self._stacks.get(whole_name(module))

    def _names(self, name: str) -> set[str]:
        """Of a checkpoint's module, in transformers."""
        family, bare = self._family, name.removeprefix(self._family.prefix)
        names = {name, bare, f"model.{bare}"}  # the last: where checkpoints call a module otherwise
        if family.wrapper is not None:  # whose modules transformers has called in three ways
            names |= {family.wrapper.name_of(name), f"model.language_model.{bare}", f"language_model.model.{bare}"}
        return names

    @property
    def kinds(self) -> list[str]:
        """The last parts of the names, for messages."""
        return sorted({name.rpartition(".")[2] for name in self.named})

    def lacks_experts(self, module: str) -> bool:
        """It is of experts, for which there is no room."""
        return self.has_experts and not self._stacks and ".experts." in f"{module}."


def whole_name(module: str) -> str:
    """Of the experts of a layer, without what PEFT puts behind."""
    return module.removesuffix(_BEHIND).removesuffix(_BEHIND)


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
            layer = _layer_name(row)
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
    kept, targets = config.max_loras + (0 if on_device else config.max_cpu_loras), Targets(spec, config)
    values, outputs = 0, Counter[tuple[str, int]]()
    for part, own in own_parts(spec, targets, shard, stage).items():
        rank = targets.most_rank(part)
        values += rank * own.inputs
        outputs[own.layer, rank] += own.outputs
    values += sum(rank * -(-count // BLOCK) * BLOCK for (_, rank), count in outputs.items())  # as packed ones have them
    return kept * values * dtype_bytes


def _layer_name(rows: Rows) -> str:
    layer = rows.parameter.removesuffix(".weight")
    return layer if rows.expert is None else f"{layer}.{rows.expert}"


def _of_expert(experts: ExpertsSpec, hidden: int, name: str, expert: int) -> list[Part]:
    """See `Stack`."""
    inner, first = experts.inner_size, f"{name}.gate_up"
    rows = [Rows(first, start, inner, expert=expert) for start in range(0, experts.first_size, inner)]
    parts = [Part(_layer_name(each), index, each) for index, each in enumerate(rows)]
    down = Rows(f"{name}.down", 0, hidden, expert=expert)
    return [*parts, Part(_layer_name(down), 0, down)]


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
