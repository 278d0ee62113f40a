"""Where runners live is behind this: in process (thread), other processes, other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.step import LoadReport, StepPlan, StepResult, WarmUpReport


class Executor(Protocol):
    """Runs steps strictly in the order of submission. Only the core's thread calls these methods.

    An exception inside a step is raised by the `collect` that would have returned its result.
    """

    def load(self) -> LoadReport:
        """Load weights, choose the attention backend, measure a step's memory."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache: `num_blocks` blocks over all layers."""
        ...

    def warm_up(self) -> WarmUpReport:
        """Compile and capture; after this nothing compiles. Graphs that are not needed at once are captured later,
        between steps."""
        ...

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        """Start a step and return at once. `done` is called once, from any thread, when `collect` has this step's
        result (or its exception) at hand and would return at once."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step that was not collected."""
        ...

    def compiles_after_ready(self) -> int:
        """Compilations since `warm_up` returned; stays 0."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...
