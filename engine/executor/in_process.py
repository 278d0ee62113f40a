"""The runner in a thread of this process: the core plans step N + 1 in its own thread while step N computes here.

One thread does everything that touches tensors, strictly in order, so the runner needs no locks and torch's per-thread
settings (threads, inference mode, current device) hold for all of it. torch releases the GIL inside its operators. On a
device that runs behind, a second thread waits for results (`result_waiter`). `inline` does without threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch

from compilation.behind import CompileJob, Swap
from engine.adapters.request import LoRARequest
from engine.adapters.store import AdapterStore
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.affinity import Binding, Places
from engine.executor.behind import CompilationBehind
from engine.executor.interface import CompileState
from engine.executor.profiled import StepsProfile
from engine.executor.result_waiter import ResultWaiter
from engine.executor.runner import Pending, Runner
from engine.executor.team import Team
from engine.kv_transfer.memory import KVMemory
from engine.reports import LoadReport, WarmUpReport
from engine.runner.model_runner import ModelRunner
from engine.step import StepMasks, StepPlan, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


STEPS_BETWEEN_IDLE_WORK = 16
"""Under steady load the runner's idle work gets a turn at least this often: graphs that are captured late are worth a
step's delay now and then, and a step never waits longer than one turn."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


_Reply = SimpleQueue["T | _Failure"]


class InProcessExecutor:
    """See `engine.executor.interface.Executor`.

    After a step has failed the device tables are in an unknown state: later steps are not run, and their `collect` says
    so. While no step is queued or in flight, and now and then between steps, the worker gives the runner turns for its
    idle work (capturing graphs). What is left to compile after warm-up compiles in a thread of its own; what it made is
    put in by the worker, between two steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_runner: Callable[[EngineConfig], Runner] = ModelRunner.load,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`leave`: called as it is closed, while a step may run that waits for others."""
        self._config = config
        self._leave = leave
        self._load_runner = load_runner
        self._runner: Runner | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._done: _Reply[StepResult] = SimpleQueue()
        self._waiter: ResultWaiter | None = None
        """made by the first step whose result is not at hand when it was started; all later ones go through it, so that
        they stay in order"""
        self._masks: SimpleQueue[StepMasks | None] = SimpleQueue()
        """for the steps that wait for them; None: none will come"""
        self._uncollected = 0
        self._places: Places | None = None
        """where the thread that computes does so"""
        self._binding: Binding | None = None
        self._failed: tuple[str, BaseException] | None = None
        self._idle_work_left = False
        self._steps_since_idle_work = 0
        self._compilation: CompilationBehind | None = None
        self._compile_state: CompileState = "done"
        self._compile_watcher = _nothing
        self._profile: StepsProfile | None = None
        self._closing = threading.Event()
        self._start()

    def load(self) -> LoadReport:
        def load() -> LoadReport:
            self._settle()
            self._runner = self._load_runner(self._config)
            return self._runner.report

        return self._call(load)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._call(lambda: self._loaded().allocate(num_blocks, num_host_blocks))

    def warm_up(self) -> WarmUpReport:
        def warm_up() -> WarmUpReport:
            report = self._loaded().warm_up()
            self._idle_work_left = True
            if report.compile_failed:
                self._compile_state = "failed"
            if (job := self._loaded().compile_job()) is not None:
                self._compile_behind(job)
            return report

        return self._call(warm_up)

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._refuse_when_closed()
        self._uncollected += 1

        def work() -> None:
            started = self._step(plan)
            self._steps_since_idle_work += 1

            def hand_over() -> None:
                self._done.put(self._result(plan.step_id, started))
                done()

            if self._waiter is None and not isinstance(started, _Failure) and not started.at_hand:
                self._waiter = ResultWaiter(self._use_device)
            if self._waiter is None:
                hand_over()
            else:
                self._waiter.put(hand_over)

        self._work.put(work)

    def sample(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def collect(self) -> StepResult:
        if not self._uncollected:
            raise EngineError("collect without a submitted step: every step that was submitted has been collected")
        self._refuse_when_closed()
        try:
            return _unwrap(self._done.get())
        finally:
            self._uncollected -= 1
            if self._idle_work_left and not self._uncollected:
                self._work.put(_nothing)  # wakes the worker: nothing is in flight any more

    def compile_state(self) -> CompileState:
        return self._compile_state

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        self._compile_watcher = changed
        if self._compile_state != "running":
            changed()

    def compiles_after_ready(self) -> int:
        # A counter's value; it needs no turn in the worker's queue behind a running step.
        return self._loaded().compiles_after_ready()

    def part_seconds(self) -> dict[str, float]:
        return self._loaded().part_times.seconds()

    @property
    def is_profiling(self) -> bool:
        return self._profile is not None

    def start_profile(
        self, path: str, steps: int, core_seconds: Callable[[], dict[str, float]], done: Callable[[], None]
    ) -> None:
        """See `MakesProfiles`."""
        parts, on_gpu = self._loaded().part_times, self._config.device.kind == "cuda"

        def start() -> None:
            threads = {"runner": parts.seconds_so_far, "core": core_seconds}
            try:
                self._profile = self._profile or StepsProfile(path, steps, threads, on_gpu)
            except Exception:
                logger.exception("no profile: torch's profiler failed")
            done()

        self._between_steps(start)

    def end_profile(self, done: Callable[[], None]) -> None:
        def end() -> None:
            self._write_profile()
            done()

        self._between_steps(end)

    def _write_profile(self) -> None:
        """On the thread that computes."""
        if self._profile is not None:
            self._profile.end()
            self._profile = None

    def team(self) -> Team | None:
        return None

    def kv_memory(self) -> KVMemory:
        return self._call(lambda: self._loaded().kv_memory())

    def adapters(self, notify: Callable[[LoRARequest], None] | None) -> AdapterStore:
        tables = self._loaded().adapters
        assert tables is not None
        return AdapterStore(tables, notify)

    def close(self) -> None:
        """Lets the running steps end, drops those behind them, joins the threads."""
        if self._closing.is_set():
            return
        if self._profile is not None:
            with suppress(EngineError):
                self._call(self._write_profile)
        self._closing.set()
        self._leave()
        if self._compilation is not None:
            self._compilation.stop()
        self._stop()
        self._give_up_places()
        self._unbind()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    def _stop(self) -> None:
        self._masks.put(None)
        self._work.put(None)
        self._thread.join()
        if self._waiter is not None:
            self._waiter.close()

    def _between_steps(self, work: Callable[[], None]) -> None:
        """Called from another thread."""
        self._work.put(work)

    def _use_device(self) -> None:
        """The current device is a thread's own; a thread that has none would wake device 0, whichever is served."""
        if self._config.device.kind == "cuda":
            torch.cuda.set_device(self._config.device.index)

    def _compile_behind(self, job: CompileJob) -> None:
        self._compile_state = "running"
        began = time.monotonic()
        logger.info("serving eagerly while pieces compile")

        def deliver(result: Swap | BaseException) -> None:
            self._between_steps(lambda: self._end_compilation(result, time.monotonic() - began))

        self._compilation = CompilationBehind(job, self._prepare_thread, deliver)

    def _end_compilation(self, result: Swap | BaseException, seconds: float) -> None:
        """Between steps."""
        if isinstance(result, BaseException):
            logger.warning(
                "compilation failed after %.1f s; serving goes on eagerly, which is slower (compile='none' says that "
                "this is wanted): %s: %s",
                seconds,
                type(result).__name__,
                result,
            )
            self._compile_state = "failed"
        else:
            result()
            logger.info("compiled: pieces swapped in after %.1f s", seconds)
            self._compile_state = "done"
        self._compile_watcher()

    def _settle(self) -> None:
        """Before the calling thread's first computation: the threads that OpenMP starts from it inherit its CPUs."""
        if (cores := self._config.device.cores) is not None:
            self._unbind()
            self._binding = Binding(cores)
        self._prepare_thread()
        alone = self._config.parallel.ranks == 1  # other ranks without cores of their own compute on all of them, too
        if self._config.device.kind == "cpu" and (alone or cores is not None):
            self._give_up_places()
            self._places = Places(self._config.device.threads, Path(self._config.compile.cache_dir))

    def _give_up_places(self) -> None:
        if self._places is not None:
            self._places.close()
        self._places = None

    def _unbind(self) -> None:
        if self._binding is not None:
            self._binding.undo()
        self._binding = None

    def _prepare_thread(self) -> None:
        torch.set_num_threads(self._config.device.threads)  # OpenMP keeps the number for each thread
        self._use_device()

    def _run(self) -> None:
        while (work := self._next_work()) is not None and not self._closing.is_set():
            work()
            del work  # a closure keeps its plan alive otherwise until the next one comes
        self._runner = None

    def _next_work(self) -> Callable[[], None] | None:
        """Waits for work, and gives the runner its turns meanwhile."""
        while self._idle_work_left and not self._closing.is_set():
            idle = self._work.empty() and not self._uncollected
            if not idle and self._steps_since_idle_work < STEPS_BETWEEN_IDLE_WORK:
                break
            self._steps_since_idle_work = 0
            try:
                self._idle_work_left = self._failed is None and self._loaded().idle_work()
            except BaseException as error:
                self._failed = "the work between steps", error
        return self._work.get()

    def _step(self, plan: StepPlan) -> Pending | _Failure:
        if self._failed is not None:
            failed, cause = self._failed
            skipped = EngineError(f"step {plan.step_id} was not run, because {failed} failed: {cause}")
            skipped.__cause__ = cause
            return _Failure(skipped)
        try:
            with self._places or nullcontext():
                pending = self._loaded().execute(plan, lambda: self._masks_of(plan))
            if self._profile is not None and self._profile.step_over():
                self._profile = None
            return pending
        except BaseException as error:
            self._failed = f"step {plan.step_id}", error
            return _Failure(error)

    def _masks_of(self, plan: StepPlan) -> StepMasks:
        masks = self._masks.get()
        if masks is None:
            raise EngineError("the executor is closed")
        if masks.step_id != plan.step_id:
            raise EngineError(f"masks of step {masks.step_id} came for step {plan.step_id}")
        return masks

    def _result(self, step_id: int, started: Pending | _Failure) -> StepResult | _Failure:
        if isinstance(started, _Failure):
            return started
        try:
            return started.wait()
        except BaseException as error:
            self._failed = self._failed or (f"step {step_id}", error)
            return _Failure(error)

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` in the worker thread, in its turn, and wait for it."""
        self._refuse_when_closed()
        reply: _Reply[T] = SimpleQueue()

        def work() -> None:
            try:
                reply.put(function())
            except BaseException as error:
                reply.put(_Failure(error))

        self._work.put(work)
        return _unwrap(reply.get())

    def _loaded(self) -> Runner:
        if self._runner is None:
            raise EngineError("the executor has no model: call load() first")
        return self._runner

    def _refuse_when_closed(self) -> None:
        if self._closing.is_set():
            raise EngineError("the executor is closed")


def _nothing() -> None:
    """Work that is no work."""


def _unwrap(reply: T | _Failure) -> T:
    if isinstance(reply, _Failure):
        raise reply.error
    return reply
