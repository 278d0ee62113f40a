"""Where runners live is behind this: in process (thread), other processes, other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.executor.team import Team
from engine.kv_transfer.memory import KVMemory
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult

CompileState = Literal["done", "running", "failed"]
"""running: steps are computed eagerly until compiled pieces take over; failed: they stay eager (on a GPU, full
decode graphs of the model itself, where the attention backend allows)"""


class Executor(Protocol):
    """Runs steps strictly in the order of submission. Only the core's thread calls these methods, but for those that
    say how things are (`compile_state`, `compiles_after_ready`, `part_seconds`), which the one may that receives.

    An exception inside a step is raised by the `collect` that would have returned its result.
    """

    def load(self) -> LoadReport:
        """Load weights, choose the attention backend, measure a step's memory."""
        ...

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache: `num_blocks` blocks over the layers of a group, and as many as `num_host_blocks` in
        host memory to swap to."""
        ...

    def warm_up(self) -> WarmUpReport:
        """Bring the model to the point where it serves. What is missing then goes on while it serves: pieces that
        compile (`compile_state`) take over between two steps, graphs that are not needed at once are captured there."""
        ...

    def compile_state(self) -> CompileState:
        """Whether compiled pieces are in place, as far as they are wanted."""
        ...

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        """`changed` is called from any thread whenever `compile_state` is no longer "running" (at once if it is not
        now), and when another rank is lost: `compile_state` raises the cause then. One watcher: a later one takes the
        place of an earlier one."""
        ...

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        """Start a step and return at once. `done` is called once, from any thread, when `collect` has this step's
        result (or its exception) at hand and would return at once."""
        ...

    def sample(self, masks: StepMasks) -> None:
        """What a submitted step waits for that has masked rows; for each of them once, in the order of the steps."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step that was not collected."""
        ...

    def compiles_after_ready(self) -> int:
        """Compilations since compiled pieces took over (or `warm_up` returned, where there are none); stays 0."""
        ...

    def part_seconds(self) -> dict[str, float]:
        """What the runner's thread has spent on each part of its steps (`step_profile`), since it began."""
        ...

    def team(self) -> Team | None:
        """torch's threads, for the caller's work between two steps. None: they are not the caller's."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


@runtime_checkable
class MayComputeInCollect(Protocol):
    """An executor that says whether `done` is called at once, and the step computed in `collect`."""

    @property
    def computes_in_collect(self) -> bool: ...


@runtime_checkable
class HoldsPages(Protocol):
    """An executor whose KV cache is in this process' memory."""

    def kv_memory(self) -> KVMemory:
        """The allocated cache as bytes, for a transfer. Raises `EngineError` on another device than a CPU."""
        ...


@runtime_checkable
class MakesProfiles(Protocol):
    """An executor that records its steps where it is asked to."""

    is_profiling: bool

    def start_profile(
        self, path: str, steps: int, core_seconds: Callable[[], dict[str, float]], done: Callable[[], None]
    ) -> None:
        """From the next step on (`StepsProfile`), unless it does so already. Returns at once: a step may wait for the
        caller. `done` is called from any thread, also where it failed. `core_seconds`: see `part_seconds`, of the
        core's thread."""
        ...

    def end_profile(self, done: Callable[[], None]) -> None:
        """What was recorded has been written when `done` is called. As `start_profile`."""
        ...


@runtime_checkable
class HoldsAdapters(Protocol):
    def adapters(self, notify: Callable[[LoRARequest], None] | None) -> AdapterLoader:
        """Who loads adapters into the slots of a model that has them, once. `notify`, from any thread, is told what
        has been loaded; without it loading waits."""
        ...
