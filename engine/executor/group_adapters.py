"""Adapters of a model that several ranks compute: each reads the files itself, and keeps its part."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.executor.frames import LoadAdapter, LoadedAdapter, encode_message
from engine.executor.worker_watch import WorkerWatch


class GroupAdapters:
    """See `engine.adapters.interface.AdapterLoader`. An adapter is loaded when the last rank has told so; what one of
    them cannot load is not there."""

    def __init__(
        self,
        workers: WorkerWatch,
        local: Callable[[Callable[[LoRARequest], None] | None], AdapterLoader],
        notify: Callable[[LoRARequest], None] | None,
    ) -> None:
        """`local`: makes rank 0's own, for what it is to tell. `notify`: see `HoldsAdapters`."""
        self._workers, self._notify = workers, notify
        self._lock = threading.Lock()
        self._missing: dict[LoRARequest, int] = {}
        """ranks that have not told"""
        self._problems: dict[LoRARequest, str] = {}
        """the first that a worker has told"""
        self._local = local(None if notify is None else self._told)
        if notify is not None:
            workers.heard_of_adapter = self._heard

    @property
    def num_slots(self) -> int:
        return self._local.num_slots

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        self._missing[adapter] = 1 + len(self._workers.pids)
        self._workers.send(encode_message(LoadAdapter(adapter, slot)))
        self._workers.owe()
        is_loaded = self._local.load(adapter, slot)
        if self._notify is None:
            for rank, answer in enumerate(self._workers.answers(), 1):
                assert isinstance(answer, LoadedAdapter)
                self._note(rank, answer)
            return True
        if is_loaded:
            self._told(adapter)
        return False

    def problem(self, adapter: LoRARequest) -> str | None:
        self._workers.owe_less()
        own, others = self._local.problem(adapter), self._problems.pop(adapter, None)
        return own or others

    def _heard(self, rank: int, answer: LoadedAdapter) -> None:
        """From the thread that watches the workers."""
        self._note(rank, answer)
        self._told(answer.adapter)

    def _note(self, rank: int, answer: LoadedAdapter) -> None:
        if answer.problem is not None:
            self._problems.setdefault(answer.adapter, f"rank {rank}: {answer.problem}")

    def _told(self, adapter: LoRARequest) -> None:
        """From any thread."""
        with self._lock:
            self._missing[adapter] -= 1
            is_last = not self._missing[adapter]
            if is_last:
                del self._missing[adapter]
        if is_last and self._notify is not None:
            self._notify(adapter)
