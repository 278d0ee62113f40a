"""What the core's loop needs of others that it does not make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.adapters.request import LoRARequest
from engine.core.wire import AddRequest, CoreStats, Delta, KVDigests
from engine.kv_transfer.interface import News
from engine.step import StepMasks, StepPlan, StepResult


class StepScheduler(Protocol):
    """What the loop needs of `engine.scheduling.Scheduler`."""

    @property
    def has_work(self) -> bool:
        """True while `plan` may bring something without a message before."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while any request is unfinished."""
        ...

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> Sequence[Delta]: ...

    def plan(self) -> StepPlan | None: ...

    def end_failed(self) -> Sequence[Delta]:
        """What `plan` could not do for single requests, which end with it."""
        ...

    def has_begun(self, request_id: str) -> bool:
        """A step has taken it up; true for one that is over, too."""
        ...

    def give_up(self, request_id: str) -> Sequence[Delta]:
        """End a request that no step has taken up yet."""
        ...

    def masks(self) -> StepMasks | None:
        """What the oldest step in flight waits for before it samples, once; all steps before it are complete."""
        ...

    def complete(self, result: StepResult, seconds: float = 0.0) -> Sequence[Delta]: ...

    def grammar_compiled(self, grammar: str) -> Sequence[Delta]: ...

    def adapter_loaded(self, adapter: LoRARequest) -> Sequence[Delta]: ...

    def transferred(self, news: News) -> Sequence[Delta]: ...

    def steps_changed(self) -> None: ...

    def stats(self) -> CoreStats: ...

    def reset_prefix_cache(self) -> object: ...

    def unpin(self, name: str) -> None: ...


class KVReports(Protocol):
    """What the loop needs of `engine.core.kv_reports`."""

    def take(self) -> KVDigests | None:
        """What is to be told the front end of the prefix cache since the last call."""
        ...

    def close(self) -> None: ...
