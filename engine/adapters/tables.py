"""The device's side of adapters: their factors in slots, and which rows of a step have which."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.adapters.config import LoRAConfig
from engine.adapters.experts import AdaptedExperts
from engine.adapters.linear import Adapted, Place, Room, adapted
from engine.adapters.peft import Factors
from engine.adapters.reader import AdapterReader
from engine.adapters.targets import Own, Targets, own_parts
from engine.adapters.writing import write
from engine.models.decoder import Decoder
from engine.models.parallel import SummedExperts, SummedLinear
from engine.models.sharding import Shard
from engine.models.spec import DecoderSpec
from engine.models.stages import Stage
from engine.step import Rows

_CPU = torch.device("cpu")
_LAST = 1 << 30
_OF_EXPERTS = ".experts."


class HostBuffers(Protocol):
    """See `engine.runner.staging.BufferRing`."""

    def acquire(self, words: int = 0) -> torch.Tensor: ...

    def commit(self) -> None: ...


class StepAdapters:
    """Rows grouped by adapter. `table`: int32 [2 + 2 · most tokens]: how many rows have one; the slot of each row, -1:
    none; all rows: those by slot, then the others, then those that the step does not have; how many it has."""

    def __init__(self, most_tokens: int, device: torch.device = _CPU) -> None:
        self.table = torch.zeros(2 + 2 * most_tokens, dtype=torch.int32)
        self._most = most_tokens
        self._written = self.table.numpy()
        self._written[1 + most_tokens : -1] = np.arange(most_tokens)
        self._any = True
        if device.type == "cuda":
            self.table = torch.full((2 + 2 * most_tokens,), -1, dtype=torch.int32, device=device)

    def set(self, slots: np.ndarray) -> None:
        """`slots`: int32 [tokens]."""
        table, most, count = self._written, self._most, len(slots)
        has_one = slots >= 0
        table[0] = np.count_nonzero(has_one)
        if table[0]:
            table[1 : 1 + count] = slots
            order, before = table[1 + most : -1], table[-1]
            order[:count] = np.argsort(np.where(has_one, slots, _LAST), kind="stable")
            order[count:before] = np.arange(count, before)
            table[-1] = count

    def send(self, slots: np.ndarray, host: torch.Tensor) -> None:
        """`set` for a device: slots alone, behind what its current stream has queued; -1 for rows that pad a graph.
        `host`: int32 [1 + most tokens] at least, untouched until the copy is done."""
        has_any = bool((slots >= 0).any())
        if has_any or self._any:
            host[: 1 + self._most].fill_(-1)
            host.numpy()[1 : 1 + len(slots)] = slots
            self.table[: 1 + self._most].copy_(host[: 1 + self._most], non_blocking=True)
        self._any = has_any


class AdapterTables:
    """Puts `Adapted` layers in the place of a model's linear layers. On a CPU a slot may be written while steps read
    others."""

    def __init__(
        self,
        model: Decoder,
        spec: DecoderSpec,
        config: LoRAConfig,
        most_tokens: int,
        device: torch.device = _CPU,
        shard: Shard | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`spec`: of the whole model, of which `model` is that part of those layers."""
        self.num_slots, self.most_kept = config.max_loras, config.max_cpu_loras
        self.kept_bytes = 0
        """of factors that are kept beside those in slots, at most, where that is the device's memory"""
        targets = Targets(spec, config)
        self._step = StepAdapters(most_tokens, device)
        self.on_device = device.type == "cuda"
        own = own_parts(spec, targets, shard, stage)
        self.reader = AdapterReader(targets, own, model.dtype, is_part=shard is not None or stage is not None)
        parts: dict[str, list[Own]] = {}
        for each in own.values():
            parts.setdefault(each.layer, []).append(each)
        self._layers: dict[str, Adapted] = {}
        self._experts: dict[str, AdaptedExperts] = {}
        """by their layer"""
        self._rooms: dict[tuple[str, int], Room] = {}
        """of layers' parts"""
        for name, of_layer in parts.items():
            ends = tuple(own.start + own.outputs for own in of_layer)
            place = Place(ends, self._step.table, config.max_loras, config.max_lora_rank, model.dtype, device)
            of_experts, found, _ = name.partition(_OF_EXPERTS)
            if not found:
                self._layers[name] = _replaced(model, name, place)
            elif of_experts not in self._experts:
                room = place._replace(max_rank=config.max_lora_expert_rank)
                self._experts[of_experts] = _replaced_experts(model, of_experts, spec.hidden_size, room)
        if not self.on_device:
            sizes = (layer.nbytes for layer in self._all())
            self.kept_bytes = sum(size // config.max_loras * config.max_cpu_loras for size in sizes)

    def write(self, slot: int, factors: list[Factors]) -> None:
        """The adapter is in the slot; no step in flight has a row of it."""
        for layer in self._all():
            layer.clear(slot)
        write(slot, [(self._room(each.own), each) for each in factors])
        for experts in self._experts.values():
            experts.settle(slot)

    def _room(self, own: Own) -> Room:
        room = self._rooms.get((own.layer, own.number))
        if room is None:
            of_experts, found, rest = own.layer.partition(_OF_EXPERTS)
            if found:
                kind, _, expert = rest.partition(".")
                room = self._experts[of_experts].room(int(expert), kind == "gate_up", own.number, own.start)
            else:
                room = self._layers[own.layer].room(own.number, own.start)
            self._rooms[own.layer, own.number] = room
        return room

    def _all(self) -> list[Adapted | AdaptedExperts]:
        return [*self._layers.values(), *self._experts.values()]

    def begin_step(self, slots_of_rows: np.ndarray, rows: Rows, ring: HostBuffers) -> None:
        """`slots_of_rows`: int32, by row of the device's tables; `ring`: for a device's copies."""
        slots = np.repeat(slots_of_rows[rows.row], rows.query_lens)
        if self.on_device:
            self._step.send(slots, ring.acquire())
            ring.commit()
        else:
            self._step.set(slots)


def _replaced(model: Decoder, name: str, place: Place) -> Adapted:
    """What is in the layer's place now. Before ranks add up their parts of a sum, each has changed its own."""
    path, _, attribute = name.rpartition(".")
    layer = model.get_submodule(path)
    linear = getattr(layer, attribute)
    if isinstance(linear, SummedLinear):
        linear.part = changed = adapted(linear.part, place)
    else:
        changed = adapted(linear, place)
        setattr(layer, attribute, changed)
    return changed


def _replaced_experts(model: Decoder, name: str, hidden: int, place: Place) -> AdaptedExperts:
    layer = model.get_submodule(name)
    experts = layer.experts
    if isinstance(experts, SummedExperts):
        experts.part = changed = AdaptedExperts(experts.part, hidden, place)
    else:
        assert isinstance(experts, torch.nn.Module)
        changed = AdaptedExperts(experts, hidden, place)
        layer.experts = changed
    return changed
