"""An engine that can be watched: the product's core loop and runner, with clocks around them.

`ProbeClient` stands where `LLM` puts its in-process client, so that one loaded model serves both a whole `generate` and
single steps turned by hand. The engine is not changed for it.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compilation.behind import CompileJob
from compilation.interface import CompileReport
from engine import LLM
from engine.adapters.tables import AdapterTables
from engine.config import EngineArgs, EngineConfig
from engine.core.loop import CoreLoop
from engine.core.start import build_core
from engine.core.wire import AbortRequests, AddRequest, CoreReady, ResetPrefixCache, StepOutputs, ToCore, each_delta
from engine.executor.in_process import InProcessExecutor
from engine.executor.runner import Pending
from engine.kv_transfer.memory import KVMemory
from engine.observability.step_profile import PartTimes
from engine.reports import LoadReport, WarmUpReport
from engine.runner.model_runner import ModelRunner
from engine.runner.step_sampler import no_masks
from engine.step import RowParams, StepMasks, StepPlan
from gpu.context import Context

MAX_FUNCTIONS = 24


class TimedRunner:
    """`ModelRunner`, and what each `execute` cost its thread."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.execute_us: list[float] = []
        self.profiler: cProfile.Profile | None = None
        """watches `execute` while it is there"""
        self._all_captured = threading.Event()

    @property
    def report(self) -> LoadReport:
        return self.inner.report

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.inner.allocate(num_blocks)

    def kv_memory(self) -> KVMemory:
        return self.inner.kv_memory()

    def warm_up(self) -> WarmUpReport:
        self.warm_up_report = self.inner.warm_up()
        return self.warm_up_report

    def execute(self, plan: StepPlan, masks: Callable[[], StepMasks] = no_masks) -> Pending:
        started, profiler = time.perf_counter(), self.profiler
        with profiler or nullcontext():
            pending = self.inner.execute(plan, masks)
        self.execute_us.append(1e6 * (time.perf_counter() - started))
        return pending

    def idle_work(self) -> bool:
        more = self.inner.idle_work()
        if not more:
            self._all_captured.set()
        return more

    def wait_captured(self, timeout_s: float) -> bool:
        """Until every graph is there, so that a measurement does not meet a capture. False: not in time."""
        return self._all_captured.wait(timeout_s)

    def graphs(self) -> dict[str, int]:
        """Number and bytes of the graphs captured so far."""
        graphs = self.inner._graphs  # a probe looks inside; nothing else may
        if graphs is None:
            return {"graphs_captured": 0, "graph_bytes": 0}
        return {"graphs_captured": graphs.num_captured, "graph_bytes": graphs.memory_bytes}

    @property
    def part_times(self) -> PartTimes:
        return self.inner.part_times

    def compile_job(self) -> CompileJob | None:
        return self.inner.compile_job()

    @property
    def adapters(self) -> AdapterTables | None:
        return self.inner.adapters

    def compiles_after_ready(self) -> int:
        return self.inner.compiles_after_ready()

    def compile_report(self) -> CompileReport:
        """Of the pieces that steps run; zeros where they run the model itself."""
        compiled = self.inner.compiled
        return CompileReport(0, 0, 0, 0, 0.0) if compiled is None else compiled.report

    def kv_caches(self) -> list[torch.Tensor]:
        """Every layer's cache, to be poisoned between steps."""
        return list(self.inner._attention._kv_caches)  # a probe looks inside; nothing else may


class ProbeClient:
    """See `engine.core.client.CoreClient`."""

    runner: TimedRunner
    loop: CoreLoop

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._executor = InProcessExecutor(config, self._load)

    def _load(self, config: EngineConfig) -> TimedRunner:
        self.runner = TimedRunner(ModelRunner.load(config))
        return self.runner

    def start(self) -> CoreReady:
        try:
            self.loop, ready = build_core(self._config, self._executor)
        except BaseException:
            self.close()
            raise
        return ready

    def send(self, message: ToCore) -> None:
        self.loop.inbox.put(message)

    def wait_compiled(self) -> None:
        """Without graphs pieces are compiled while the core serves, and put in by the runner's thread."""
        changed = threading.Event()
        self._executor.watch_compilation(changed.set)
        changed.wait()

    def compile_problem(self) -> str | None:
        """Why steps do not run compiled pieces although they should."""
        return "they failed; the log says why" if self._executor.compile_state() == "failed" else None

    def recv(self) -> StepOutputs:
        while self.loop.has_work:
            outputs = self.loop.turn(wait=False)
            if outputs is not None:
                return outputs
        raise RuntimeError("the core has no work")

    async def recv_async(self) -> StepOutputs:
        return self.recv()

    def stalled(self) -> str | None:
        return None

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        self._executor.close()


@dataclass
class Probe:
    """A loaded engine and the client inside it."""

    llm: LLM
    client: ProbeClient

    def close(self) -> None:
        self.llm.shutdown()


def open_probe(args: EngineArgs) -> Probe:
    clients: list[ProbeClient] = []

    def make(config: EngineConfig) -> ProbeClient:
        clients.append(ProbeClient(config))
        return clients[0]

    llm = LLM.from_args(args, client_factory=make)
    return Probe(llm, clients[0])


class SteadyDecode:
    """`batch` sequences that only decode: entered past their prompts, left by aborting them."""

    def __init__(self, client: ProbeClient, batch: int, prompt_len: int, steps: int, vocab: int) -> None:
        """`steps`: how many will be asked for, at most."""
        self._client = client
        self._ids = [f"steady {i}" for i in range(batch)]
        first = 5
        for i, request_id in enumerate(self._ids):
            prompt = [(first + i + 7 * j) % (vocab - first) + first for j in range(prompt_len)]
            params = RowParams(seed=i, temperature=0.0)
            request = AddRequest(
                request_id=request_id, prompt_token_ids=prompt, params=params, max_tokens=steps + prompt_len + 64
            )
            client.send(request)
        waiting = set(self._ids)
        while waiting:
            for delta in each_delta(client.recv().deltas):
                if delta.error is not None:
                    raise RuntimeError(f"{delta.request_id}: {delta.error}")
                waiting.discard(delta.request_id)
        self.steps(4)

    def steps(self, count: int) -> list[float]:
        """Milliseconds from one step's result to the next one's."""
        times = [time.perf_counter()]
        while len(times) <= count:
            if self._client.recv().deltas:
                times.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(times)]

    def leave(self) -> None:
        self._client.send(AbortRequests(request_ids=self._ids))
        self._client.send(ResetPrefixCache())
        while self._client.loop.has_work:
            self._client.loop.turn(wait=False)


def _host_profile(runner: TimedRunner, decode: SteadyDecode, steps: int) -> dict[str, float]:
    """Microseconds of a step in the functions that take most, without what they call; the profiler's own are in it."""
    runner.profiler = profiler = cProfile.Profile()
    try:
        decode.steps(steps)
    finally:
        runner.profiler = None
    stats: Any = pstats.Stats(profiler)
    sums = {f"{Path(file).name}:{line} {name}": own for (file, line, name), (_, _, own, _, _) in stats.stats.items()}
    longest = sorted(sums, key=lambda name: -sums[name])[:MAX_FUNCTIONS]
    return {name: round(1e6 * sums[name] / steps, 1) for name in longest}


def steady_figures(context: Context, probe: Probe, batch: int, prompt_len: int, vocab: int) -> dict[str, object]:
    """One row: wall time of a step, the device's share of it, and what `execute` costs."""
    count, profiled = (4, 2) if context.dry else (60, 10)
    decode = SteadyDecode(probe.client, batch, prompt_len, 3 * count, vocab)
    try:
        probe.client.runner.execute_us.clear()
        walls = decode.steps(count)
        execute = list(probe.client.runner.execute_us)
        profile = context.device.profile(lambda: decode.steps(profiled))
        host = _host_profile(probe.client.runner, decode, profiled)
    finally:
        decode.leave()
    wall, busy = statistics.median(walls), profile.busy_ms / profiled
    return {
        "batch": batch,
        "context": prompt_len + 4 + count // 2,
        "step_ms": round(wall, 4),
        "mean_step_ms": round(statistics.fmean(walls), 4),
        "busy_ms": round(busy, 4),
        "exposed_host_share": round(max(0.0, wall - busy) / wall, 4) if profile.count else None,
        "execute_host_us": round(statistics.median(execute), 1),
        "kernels_per_step": round(profile.count / profiled, 1),
        "host_us": host,
        "kernels_us": {name: round(1e3 * ms / profiled, 1) for name, ms in profile.by_name_ms.items()},
    }
