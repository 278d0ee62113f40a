"""A real core whose model is a stand-in, for `bench_host.py`: named as the executor of a core process."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from attention_backends.reference import ReferenceBackend
from engine.config import EngineConfig
from engine.core.loop import CoreLoop
from engine.core.mailbox import Mailbox
from engine.executor.inline import local_executor
from engine.executor.interface import Executor
from engine.models.description import describe
from engine.runner.batch import BatchBuilder
from engine.runner.kernels.host import HostKernels
from engine.runner.loading import RunnerParts
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_attention import PagedAttention
from engine.runner.request_table import RequestTable
from engine.runner.results import ResultCopier
from engine.runner.staging import StagedWrites
from engine.runner.step_sampler import no_masks
from engine.sampling import Sampler
from engine.scheduling.scheduler import Scheduler

HIDDEN, NARROW_VOCAB, FIRST_WORD = 64, 512, 300
REPORT = "bench_host.json"
WARM_UP = 20


class StandIn(torch.nn.Module):
    """Computes for about `seconds` in pieces of about 50 µs, as a small model's layers would; logits never change."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._weight = torch.randn(512, 512)
        self._input = torch.randn(64, 512)
        self._output = torch.empty(64, 512)
        self._hidden = torch.randn(4096, HIDDEN)
        self._logits = torch.randn(256, NARROW_VOCAB)
        self._logits[:, :FIRST_WORD] = -100.0  # before them are bytes, which make no text alone
        self._seconds = seconds

    def set_attention(self, attend: object) -> None:
        """Has none."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            torch.mm(self._input, self._weight, out=self._output)
        return self._hidden[: input_ids.shape[0]]

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: hidden.shape[0]]


class Clock:
    """Seconds by part; each part belongs to one thread."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[float]] = defaultdict(list)

    def watch(self, owner: type, method: str, part: str) -> None:
        """Time every call of `owner.method`."""
        inner, spent = getattr(owner, method), self.spent[part]

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        setattr(owner, method, timed)


PARTS: tuple[tuple[type, str, str], ...] = (
    (Scheduler, "plan", "loop: plan"),
    (Scheduler, "complete", "loop: complete"),
    (Scheduler, "stats", "loop: stats"),
    (CoreLoop, "turn", "loop: whole turn"),
    (Mailbox, "publish", "loop: publish"),
    (RequestTable, "stage", "runner: stage"),
    (StagedWrites, "send", "runner: send writes"),
    (StagedWrites, "apply", "runner: apply writes"),
    (BatchBuilder, "send", "runner: send fields"),
    (BatchBuilder, "build", "runner: build batch"),
    (PagedAttention, "begin_step", "runner: attention metadata"),
    (Sampler, "sample", "runner: sampling"),
    (HostKernels, "post_update", "runner: post update"),
    (ResultCopier, "start", "runner: results"),
    (StandIn, "__call__", "compute"),
    (ModelRunner, "execute", "runner: whole step"),
)


def mark_end_of(owner: object, method: str, marks: list[float]) -> None:
    """When a call ends, its time is appended."""
    real = getattr(owner, method)

    def marked(*arguments: Any) -> Any:
        try:
            return real(*arguments)
        finally:
            marks.append(time.perf_counter())

    setattr(owner, method, marked)


def timed_executor(config: EngineConfig) -> Executor:
    """What the core process is told to run. Writes its figures to `REPORT` in the cache directory when it is closed."""
    settings = json.loads((Path(config.compile.cache_dir) / "settings.json").read_text())
    clock = Clock()
    if settings["parts"]:
        for owner, method, part in PARTS:
            clock.watch(owner, method, part)
    steps: list[tuple[float, float, float, float, float]] = []
    """(execute began, compute began, compute ended, sampled, execute ended)"""
    marks: list[float] = []

    class TimedRunner(ModelRunner):
        def execute(self, plan: Any, masks: Any = no_masks) -> Any:
            marks.clear()
            marks.append(time.perf_counter())
            pending = super().execute(plan, masks)
            marks.append(time.perf_counter())
            if len(marks) == 5 and len(plan.rows) == settings["batch"]:
                steps.append(tuple(marks))  # type: ignore[arg-type]  # five of them
                if len(steps) == WARM_UP:
                    started.append((time.process_time(), len(steps)))
                    for spent in clock.spent.values():
                        spent.clear()
                if len(steps) == settings["steps"]:
                    write()
            return pending

        def _forward(self, plan: Any, batch: Any) -> Any:
            marks.append(time.perf_counter())
            try:
                return super()._forward(plan, batch)
            finally:
                marks.append(time.perf_counter())

    started: list[tuple[float, int]] = []

    def write() -> None:
        cpu, first = started[0]
        report = {
            "steps": steps[first:],
            "cpu_s_per_step": (time.process_time() - cpu) / (len(steps) - first),
            "parts": {part: list(spent) for part, spent in clock.spent.items()},
        }
        (Path(config.compile.cache_dir) / REPORT).write_text(json.dumps(report))

    def load(config: EngineConfig) -> ModelRunner:
        torch.set_num_threads(settings["threads"])
        facts = msgspec.structs.replace(describe(config.model.path).facts, vocab_size=NARROW_VOCAB)
        model, backend = StandIn(settings["compute_s"]), ReferenceBackend()
        parts = RunnerParts(model=model, facts=facts, dtype=torch.float32, backend=backend, weight_bytes=0)
        runner = TimedRunner.load(config, lambda _: parts)
        mark_end_of(runner._step_sampler, "run", marks)
        return runner

    return local_executor(config, load)
