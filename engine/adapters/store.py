"""Adapters from disk to host memory to the device's slots, by a thread that steps do not wait for."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue

import torch

from engine.adapters.peft import Factors
from engine.adapters.reader import ReadAdapter
from engine.adapters.request import LoRARequest
from engine.adapters.tables import AdapterTables
from engine.errors import EngineError, in_words

logger = logging.getLogger(__name__)


class AdapterStore:
    """See `engine.adapters.interface.AdapterLoader`. What was read last is kept, as many as `AdapterTables.most_kept`;
    `notify`, from the thread, is told what has been loaded. Without one, `load` does it itself."""

    def __init__(self, tables: AdapterTables, notify: Callable[[LoRARequest], None] | None) -> None:
        self._tables, self._notify = tables, notify
        self._kept: OrderedDict[LoRARequest, ReadAdapter] = OrderedDict()
        self._digests: dict[LoRARequest, str] = {}
        self._problems: dict[LoRARequest, str] = {}
        self._work: SimpleQueue[tuple[LoRARequest, int]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def num_slots(self) -> int:
        return self._tables.num_slots

    @property
    def needs_rest(self) -> bool:
        return False

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        if self._notify is None or self._tables.on_device:  # a device's copies are in order with its steps
            self._load(adapter, slot)
            return True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        self._work.put((adapter, slot))
        return False

    def digest(self, adapter: LoRARequest) -> str:
        return self._digests.pop(adapter, "")

    def forget(self, adapter: LoRARequest) -> None:
        self._kept.pop(adapter, None)

    def problem(self, adapter: LoRARequest) -> str | None:
        return self._problems.pop(adapter, None)

    def _run(self) -> None:
        torch.set_num_threads(1)
        assert self._notify is not None
        while True:
            adapter, slot = self._work.get()
            self._load(adapter, slot)
            self._notify(adapter)

    def _load(self, adapter: LoRARequest, slot: int) -> None:
        try:
            with torch.inference_mode():
                self._tables.write(slot, self._factors(adapter))
        except EngineError as error:
            self._problems[adapter] = str(error)
        except BaseException as error:  # whoever waits must be told, whatever it is
            logger.exception("adapter %r could not be loaded", adapter.lora_name)
            self._problems[adapter] = in_words(error)

    def _factors(self, adapter: LoRARequest) -> list[Factors]:
        reader = self._tables.reader
        read = self._kept.pop(adapter, None)
        if read is None:
            while len(self._kept) >= max(1, self._tables.most_kept):
                reader.release(self._kept.popitem(last=False)[1])
            read = reader.read(adapter)
        self._kept[adapter] = read
        if read.digest:
            self._digests[adapter] = read.digest
        return read.factors
