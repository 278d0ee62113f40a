"""A symbolic trace in one thread does not reach the modules that another one runs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx, nn

from compilation.module_calls import traces_hold


class SlowToTrace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tracing, self.go_on = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tracing.set()
        self.go_on.wait(0.3)
        return x + 1


def run_beside_a_trace(lock: threading.RLock) -> torch.Tensor:
    traced, served = SlowToTrace(), nn.Sequential(nn.Linear(2, 2))
    thread = threading.Thread(target=fx.symbolic_trace, args=(traced,))
    thread.start()
    assert traced.tracing.wait(20)
    try:
        with lock:
            return served(torch.zeros(1, 2))
    finally:
        traced.go_on.set()
        thread.join(20)


@pytest.mark.timeout(60)
def test_modules_run_while_another_thread_traces() -> None:
    lock = threading.RLock()
    before = fx.Tracer.trace
    with traces_hold(lock):
        assert run_beside_a_trace(lock).shape == (1, 2)
    assert fx.Tracer.trace is before


@pytest.mark.timeout(60)
def test_without_the_lock_the_trace_reaches_them() -> None:
    """The trap itself: should torch lose it, this room's module may go."""
    with pytest.raises(NameError, match="not installed as a submodule"):
        run_beside_a_trace(threading.RLock())
