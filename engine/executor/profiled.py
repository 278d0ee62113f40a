"""torch's trace of some steps, and what each part of them took, written where somebody asks a serving engine for it.

What torch records belongs to a thread, so all calls come from the one that computes, between two steps.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping

import torch

from engine.observability.step_profile import Seconds, part_table

logger = logging.getLogger(__name__)


class StepsProfile:
    """Runs until `steps` are over, or until `end`."""

    def __init__(self, path: str, steps: int, threads: Mapping[str, Seconds], on_gpu: bool) -> None:
        """Files are `path`, the process' number, and .trace.json.gz (Chrome's and Perfetto's format) or .txt.
        `threads`: the seconds of each part of a thread's time so far, by the thread's name."""
        self._path = f"{path}-{os.getpid()}"  # replicas are told the same
        self._wanted, self._threads = steps, threads
        self._steps = 0
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._torch = torch.profiler.profile(activities=kinds)
        self._torch.start()
        atexit.register(self._leave)
        self._before = {name: seconds() for name, seconds in threads.items()}
        self._began = time.perf_counter()

    def _leave(self) -> None:
        """The process ends, and torch's profiler with it, which would end badly while it runs."""
        self._torch.stop()

    def step_over(self) -> bool:
        """Whether it was the last one; the profile has been written then."""
        self._steps += 1
        if self._steps < self._wanted:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Write what there is. A disk that is full costs the profile, and nothing else."""
        atexit.unregister(self._leave)
        wall_s = time.perf_counter() - self._began
        spent = {name: _difference(seconds(), self._before[name]) for name, seconds in self._threads.items()}
        try:
            self._torch.stop()
            with open(f"{self._path}.txt", "w") as file:
                file.write(f"{part_table(spent, self._steps, wall_s)}\n")
            self._torch.export_chrome_trace(f"{self._path}.trace.json.gz")
        except Exception:
            logger.exception("the profile %s could not be written", self._path)
        else:
            logger.info("profile of %d steps: %s.txt, %s.trace.json.gz", self._steps, self._path, self._path)


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {part: seconds - before.get(part, 0.0) for part, seconds in now.items()}
