"""The device's side of adapters: their factors in slots, and which rows of a step have which."""

from __future__ import annotations

import numpy as np
import torch

from engine.adapters.config import LoRAConfig
from engine.adapters.linear import Adapted, Place, adapted
from engine.adapters.peft import AdapterFiles, Factors
from engine.adapters.request import LoRARequest
from engine.adapters.targets import Targets
from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec
from engine.step import Rows


class StepAdapters:
    """Rows grouped by adapter. `table`: int32 [1 + 2 · most tokens]: how many rows have one; the slot of each row, -1:
    none; those rows, by slot."""

    def __init__(self, most_tokens: int) -> None:
        self.table = torch.zeros(1 + 2 * most_tokens, dtype=torch.int32)
        self._most = most_tokens
        self._written = self.table.numpy()

    def set(self, slots: np.ndarray) -> None:
        """`slots`: int32 [tokens]."""
        (rows,) = np.nonzero(slots >= 0)
        self._written[0] = len(rows)
        if len(rows):
            self._written[1 : 1 + len(slots)] = slots
            self._written[1 + self._most : 1 + self._most + len(rows)] = rows[np.argsort(slots[rows], kind="stable")]


class AdapterTables:
    """Puts `Adapted` layers in the place of a model's linear layers. On a CPU a slot may be written while steps read
    others."""

    def __init__(self, model: Decoder, spec: DecoderSpec, config: LoRAConfig, most_tokens: int) -> None:
        self.num_slots, self.most_kept = config.max_loras, config.max_cpu_loras
        self.kept_bytes = 0
        """of factors that are kept beside those in slots, at most"""
        self._max_rank, self._dtype = config.max_lora_rank, model.dtype
        self._targets = Targets(spec)
        self._step = StepAdapters(most_tokens)
        self._layers: dict[str, Adapted] = {}
        for name, parts in self._targets.parts.items():
            path, _, attribute = name.rpartition(".")
            layer = model.get_submodule(path)
            linear = getattr(layer, attribute)
            ends = tuple(part.rows.start + part.rows.count for part in parts)
            place = Place(ends, self._step.table, config.max_loras, config.max_lora_rank, model.dtype)
            self._layers[name] = adapted(linear, place)
            setattr(layer, attribute, self._layers[name])
            size = self._layers[name].a.nbytes + self._layers[name].b.nbytes
            self.kept_bytes += size // config.max_loras * config.max_cpu_loras

    def read(self, adapter: LoRARequest) -> list[Factors]:
        """From its files. Raises `ConfigError` and `WeightsError`."""
        return AdapterFiles(adapter, self._targets, self._max_rank).factors(self._dtype)

    def write(self, slot: int, factors: list[Factors]) -> None:
        """The adapter is in the slot; no step in flight has a row of it."""
        for layer in self._layers.values():
            layer.ranks[slot].zero_()
        for (name, number, rows), a, b in factors:
            layer, rank = self._layers[name], a.size(0)
            layer.a[slot, number, :rank].copy_(a)
            layer.b[slot, :rank, rows.start : rows.start + rows.count].copy_(b)
            layer.ranks[slot, number] = rank

    def begin_step(self, slots_of_rows: np.ndarray, rows: Rows) -> None:
        """`slots_of_rows`: int32, by row of the device's tables."""
        self._step.set(np.repeat(slots_of_rows[rows.row], rows.query_lens))
