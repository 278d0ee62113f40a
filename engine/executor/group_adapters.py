"""Adapters of a model that several ranks compute: each reads the files itself, and keeps its part."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.adapters.interface import RanksAdapters
from engine.adapters.request import LoRARequest
from engine.executor.frames import LoadAdapter, LoadedAdapter, encode_message
from engine.executor.worker_watch import WorkerWatch


class GroupAdapters:
    """See `engine.adapters.interface.AdapterLoader`. An adapter is loaded when the last rank has told so; what one of
    them cannot load is not there."""

    def __init__(
        self,
        workers: WorkerWatch,
        local: Callable[[Callable[[LoRARequest], None] | None], RanksAdapters],
        notify: Callable[[LoRARequest], None] | None,
    ) -> None:
        """`local`: makes rank 0's own, for what it is to tell. `notify`: see `HoldsAdapters`."""
        self._workers, self._notify = workers, notify
        self._lock = threading.Lock()
        self._missing: dict[LoRARequest, int] = {}
        """ranks that have not told"""
        self._problems: dict[LoRARequest, str] = {}
        """the first that a worker has told"""
        self._digests: dict[LoRARequest, set[str]] = {}
        """of the files that they have read"""
        self._failed: set[LoRARequest] = set()
        """what a rank keeps of these may be another file than what the others will read"""
        self._local = local(None if notify is None else self._told)
        if notify is not None:
            workers.heard_of_adapter = self._heard

    @property
    def num_slots(self) -> int:
        return self._local.num_slots

    @property
    def needs_rest(self) -> bool:
        """Ranks may be in the middle of the next step, and wait there for this one."""
        return self._notify is None

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        anew = adapter in self._failed
        self._failed.discard(adapter)
        if anew:
            self._local.forget(adapter)
        self._digests[adapter] = set()
        if self._notify is not None:
            self._missing[adapter] = 1 + len(self._workers.pids)
        self._workers.send(encode_message(LoadAdapter(adapter, slot, anew)))
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
        digests = {*self._digests.pop(adapter), self._local.digest(adapter)}
        problem = own or others
        if problem is None and len(digests) > 1:
            problem = f"the ranks have read different files under {adapter.lora_path!r}"
        if problem is not None:
            self._failed.add(adapter)
        return problem

    def _heard(self, rank: int, answer: LoadedAdapter) -> None:
        """From the thread that watches the workers."""
        self._note(rank, answer)
        self._told(answer.adapter)

    def _note(self, rank: int, answer: LoadedAdapter) -> None:
        self._digests[answer.adapter].add(answer.digest)
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
