"""Executors without a model, named by import string so that a real core process can run them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from engine.config import CacheConfig, CompileConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core.wire import AddRequest
from engine.errors import ConfigError
from engine.executor.interface import CompileState
from engine.limits import Limits
from engine.reports import LoadReport, WarmUpReport
from engine.step import RowParams, StepMasks, StepPlan, StepResult

TOKEN = 7
MIB = 1 << 20


def tiny_config(
    *, async_scheduling: bool = True, max_waiting: int = 64, max_num_seqs: int = 8, frames: int = 65536
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path="none",
            tokenizer="none",
            served_name="none",
            dtype="float32",
            max_model_len=4096,
            vocab_size=100,
            eos_token_ids=(2,),
            seed=0,
            load_format="dummy",
        ),
        cache=CacheConfig(
            dtype="float32", block_size=16, kv_cache_memory=2 * MIB, memory_fraction=0.9, enable_prefix_caching=True
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_model_len=4096,
            max_waiting=max_waiting,
            steps_in_flight=1 + async_scheduling,
        ),
        compile=CompileConfig(mode="none", graphs="none", cache_dir="/dev/null/no-such"),
        device=DeviceConfig(kind="cpu"),
        max_logprobs=20,
        limits=Limits(frames=frames),
    )


def request(request_id: str, max_tokens: int = 4, prompt_len: int = 5) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(range(prompt_len)),
        params=RowParams(seed=1),
        max_tokens=max_tokens,
    )


class FakeExecutor:
    """A device that takes `step_s` per step in a thread of its own; every sampled token is `TOKEN`."""

    step_s = 0.005

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.log: list[tuple[str, int]] = []
        self._work: SimpleQueue[tuple[StepPlan, Callable[[], None]] | None] = SimpleQueue()
        self._done: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    def load(self) -> LoadReport:
        return LoadReport(
            weight_bytes=MIB,
            activation_bytes=MIB,
            workspace_bytes=MIB,
            block_bytes=1024,
            device_bytes_total=64 * MIB,
            device_bytes_free=64 * MIB,
            attention_backend="fake",
        )

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        assert (num_blocks, num_host_blocks) == (2048, 0)

    def warm_up(self) -> WarmUpReport:
        return WarmUpReport(distinct_pieces=3, compiled=1, reused=2)

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self.log.append(("submit", plan.step_id))
        self._work.put((plan, done))

    def sample(self, masks: StepMasks) -> None:
        """Every token is `TOKEN`."""

    def collect(self) -> StepResult:
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        self.log.append(("collect", result.step_id))
        return result

    def compile_state(self) -> CompileState:
        return "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        changed()

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return {}

    def team(self) -> None:
        return None

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def compute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.step_s)
        return StepResult(step_id=plan.step_id, token_ids=[TOKEN] * int(plan.rows.samples.sum()))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            plan, done = work
            try:
                self._done.put(self.compute(plan))
            except BaseException as error:
                self._done.put(error)
            done()


class ComputesInCollect(FakeExecutor):
    """As `engine.executor.inline`. Its second step ends when it is let go."""

    computes_in_collect = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.began, self.go = threading.Event(), threading.Event()
        self._plans: SimpleQueue[StepPlan] = SimpleQueue()

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self.log.append(("submit", plan.step_id))
        self._plans.put(plan)
        done()

    def collect(self) -> StepResult:
        plan = self._plans.get_nowait()
        if plan.step_id == 1:
            self.hold()
        self.log.append(("collect", plan.step_id))
        return self.compute(plan)

    def hold(self) -> None:
        self.began.set()
        assert self.go.wait(60)


class Gate:
    """Of a process: two files."""

    def __init__(self, pid: int) -> None:
        folder = Path(tempfile.gettempdir())
        self._computing, self._open = folder / f"core-{pid}-computing", folder / f"core-{pid}-go"

    def hold(self) -> None:
        self._computing.touch()
        _wait_for(self._open)

    def wait_until_computing(self) -> None:
        _wait_for(self._computing)

    def open(self) -> None:
        self._open.touch()

    def remove(self) -> None:
        self._computing.unlink(missing_ok=True)
        self._open.unlink(missing_ok=True)


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} does not appear"
        time.sleep(0.01)


class HeldByAFile(ComputesInCollect):
    """In a process of its own."""

    def hold(self) -> None:
        Gate(os.getpid()).hold()


class CompilingBehind(FakeExecutor):
    """It has compiled when nobody asks it anything."""

    def compile_state(self) -> CompileState:
        return "running"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        threading.Timer(1.0, changed).start()


class Slow(FakeExecutor):
    step_s = 0.7


class Raising(FakeExecutor):
    def compute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 3:
            try:
                raise KeyError("the first cause")
            except KeyError as error:
                raise RuntimeError("device lost\nin step 3") from error
        return super().compute(plan)


class Hanging(FakeExecutor):
    def compute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 2:
            time.sleep(3600)
        return super().compute(plan)


class HangingInPlan(FakeExecutor):
    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        if plan.step_id == 2:
            time.sleep(3600)
        super().submit(plan, done)


class KillingItself(FakeExecutor):
    def compute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 2:
            print("last words on stdout", flush=True)
            time.sleep(1.0)  # a token that was handed to the socket's thread leaves first: what left is not lost
            os.kill(os.getpid(), signal.SIGKILL)
        return super().compute(plan)


class LeavingWithoutAWord(FakeExecutor):
    def compute(self, plan: StepPlan) -> StepResult:
        sys.stderr.write("glibc: something bad\n")
        sys.stderr.flush()
        os._exit(3)


class NotFitting(FakeExecutor):
    def load(self) -> LoadReport:
        raise ConfigError("the model needs 9 GiB, 8 are free: lower --max-model-len")


class DyingWhileLoading(FakeExecutor):
    def load(self) -> LoadReport:
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().load()


def loading_file(pid: int) -> Path:
    """There once a `LoadingForEver` of that process loads."""
    return Path(tempfile.gettempdir(), f"pageloom-test-loading-{pid}")


class LoadingForEver(FakeExecutor):
    def load(self) -> LoadReport:
        loading_file(os.getpid()).touch()
        time.sleep(3600)
        return super().load()
