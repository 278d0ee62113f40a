"""Which graphs a runner captures, when, and when it stops: before "ready" as many as make serving good, the rest
between steps, and none that memory is too short for."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from attention_backends.interface import AttentionBackend
from compilation.graphs.capture import Capturer
from compilation.graphs.dispatcher import Dispatch, Dispatcher, Route
from compilation.graphs.graph_set import GraphSet
from compilation.graphs.memory import estimate_graph_bytes
from compilation.interface import CompiledModel
from engine.config import EngineConfig
from engine.models.facts import ModelFacts
from engine.models.step_memory import estimate_activation_bytes
from engine.runner.loading import graph_mode, is_capture_safe

logger = logging.getLogger(__name__)

RESERVE_BYTES = 256 << 20
"""stays free beside captures: for what libraries and the sampler allocate while serving"""


def make_dispatcher(
    config: EngineConfig, backend: AttentionBackend, facts: ModelFacts, error: Exception | None = None
) -> Dispatcher:
    """With nothing captured yet. `error`: why the model's pieces do not serve on this device; then what serves without
    them, and a warning says so. Raises ConfigError as `graph_mode`."""
    mode = graph_mode(config.compile.graphs, config.compile.mode, backend, facts)
    if error is not None:
        mode = graph_mode("auto", "none", backend, facts)
        logger.warning(
            "compiled pieces fail on this device; serving goes on with compile='none', graphs=%r, which is slower "
            "(setting both says that this is wanted): %s: %s",
            mode,
            type(error).__name__,
            error,
        )
    return Dispatcher(
        mode,
        backend_capture_safe=is_capture_safe(backend, facts),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
    )


def graph_activation_bytes(dispatcher: Dispatcher, model: ModelFacts, dtype_bytes: int) -> int:
    """Peak of the program, without logits, at the largest size to be captured."""
    largest = max((*dispatcher.piecewise_sizes, *dispatcher.full_sizes), default=0)
    return estimate_activation_bytes(model, dtype_bytes, largest, max_samples=0)


def graphs_estimate(dispatcher: Dispatcher, model: ModelFacts, dtype_bytes: int) -> int:
    """What all graphs together will take; a line of the memory ledger."""
    return estimate_graph_bytes(
        graph_activation_bytes(dispatcher, model, dtype_bytes),
        model.num_layers + 1,
        len(dispatcher.piecewise_sizes),
        len(dispatcher.full_sizes),
    )


class StepGraphs:
    """Captures what the dispatcher still misses, one graph at a time, and replays what it has.

    All calls come from the runner's thread. Only captured graphs are dispatched to, so a step may come between any two
    captures.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        compiled: CompiledModel,
        inputs: Sequence[torch.Tensor],
        capturer: Capturer,
        before_capture: Callable[[Route, int], None],
        free_bytes: Callable[[], int],
        first_bytes: int,
        all_ranks: Callable[[bool], bool] | None = None,
    ) -> None:
        """`free_bytes`: of the device, now. `first_bytes`: what the first capture is expected to take. `all_ranks`: of
        several that compute one model, whether something is true in each: they pad a step alike, so they have the same
        graphs, captured side by side before they serve."""
        self._dispatcher = dispatcher
        self._set = GraphSet(inputs, capturer, before_capture, compiled.run, compiled)
        self._free_bytes = free_bytes
        self._next_bytes = first_bytes
        self._all_ranks = all_ranks
        self._pending = dispatcher.pending()
        self._num_captured = 0

    @property
    def num_captured(self) -> int:
        return self._num_captured

    @property
    def num_pending(self) -> int:
        """Still to be captured; 0 after capture was given up."""
        return len(self._pending)

    @property
    def memory_bytes(self) -> int:
        """What the captured graphs took of the device."""
        return self._set.memory_bytes()

    def replay(self, dispatch: Dispatch) -> torch.Tensor:
        """[dispatch.size, hidden_size]; overwritten by the next replay."""
        return self._set.replay(dispatch.route, dispatch.size)

    def capture_first(self, budget_s: float) -> None:
        """Capture until every step that is to have a graph has one (with tolerable padding), then until `budget_s`
        since the call is spent. Shows a progress bar on a terminal.

        Memory that is too short ends it, with a warning; any other failure of a capture passes through.
        """
        until = time.monotonic() + budget_s if self._all_ranks is None else math.inf
        quiet = not (logger.isEnabledFor(logging.INFO) and sys.stderr.isatty())
        with tqdm(total=self.num_pending, desc="capturing graphs", unit="graph", leave=False, disable=quiet) as bar:
            while self._pending and not (time.monotonic() >= until and self._covers_every_step()):
                bar.set_postfix_str("{} {}".format(*self._pending[0]))
                self._capture_one()
                bar.update()

    def capture_next(self) -> bool:
        """One capture between steps; False when there is nothing left. A failure ends capturing, not serving: steps go
        on with the graphs that exist."""
        if not self._pending:
            return False
        try:
            self._capture_one()
        except RuntimeError as error:
            self._give_up(f"{type(error).__name__}: {error}")
        if not self._pending:
            logger.info("graphs: all %d captured that will be", self._num_captured)
        return bool(self._pending)

    def _capture_one(self) -> None:
        route, size = self._pending[0]
        free = self._free_bytes()
        needed = self._next_bytes + RESERVE_BYTES
        if free < needed:
            why = f"{free >> 20} MiB of device memory are free, {needed >> 20} MiB are needed"
        else:
            why = f"another rank has not the {needed >> 20} MiB of device memory that are needed"
        if not (free >= needed if self._all_ranks is None else self._all_ranks(free >= needed)):
            self._give_up(why)
            return
        taken = self._set.memory_bytes()
        try:
            self._set.capture(route, size)
        except torch.OutOfMemoryError as error:
            if self._all_ranks is not None:
                raise  # in the middle of what others do, too
            self._give_up(str(error))
            return
        grown = self._set.memory_bytes() - taken
        # The first capture fills the pool that the others live in: what it took says little of the next.
        self._next_bytes = max(grown, self._next_bytes) if self._num_captured else 0
        self._dispatcher.mark(route, size)
        self._num_captured += 1
        self._pending = self._pending[1:]

    def _give_up(self, why: str) -> None:
        logger.warning(
            "no further graphs are captured (%d are, %d were to come): %s; other steps run without. "
            "A lower --memory-fraction or --kv-cache-memory leaves more.",
            self._num_captured,
            len(self._pending),
            why,
        )
        self._pending = []

    def _covers_every_step(self) -> bool:
        def covered(sizes: Sequence[int], uniform: bool, route: Route) -> bool:
            tokens = range(1, max(sizes, default=0) + 1)
            return all(self._dispatcher.dispatch(n, uniform).route == route for n in tokens)

        d = self._dispatcher
        return covered(d.full_sizes, True, "full") and covered(d.piecewise_sizes, False, "piecewise")
