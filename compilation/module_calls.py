"""Keeps a trace in one thread from changing what modules do in another.

While `torch.fx` traces symbolically, `nn.Module.__call__` is replaced for the whole process by one that refuses modules
that the tracer does not know. A model that serves meanwhile would meet it in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.fx import Tracer


@contextmanager
def traces_hold(lock: AbstractContextManager[Any]) -> Iterator[None]:
    """Within, every symbolic trace of the process holds `lock` (reentrant: traces nest). Whoever runs modules in
    another thread holds it too. Tracers that let all modules through, as those of AOTAutograd, do not take it.

    To be entered under `inductor_lock`: what is put in place of a method must be taken back in order.
    """
    original = Tracer.trace

    def trace(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        if type(self).call_module is not Tracer.call_module:
            return original(self, *args, **kwargs)
        with lock:
            return original(self, *args, **kwargs)

    setattr(Tracer, "trace", trace)  # noqa: B010 (mypy allows no assignment to a method)
    try:
        yield
    finally:
        setattr(Tracer, "trace", original)  # noqa: B010
