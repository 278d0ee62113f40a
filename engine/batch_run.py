"""What a batch shows while it runs, and what it heeds: a progress bar, and Ctrl-C between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from engine.request import RequestOutput

Shown = bool | Callable[..., Any]


class Progress:
    """vLLM's progress bar: prompts done, and tokens a second so far."""

    def __init__(self, total: int, shown: Shown) -> None:
        """`shown`: whether, or by what in tqdm's place."""
        from tqdm import tqdm

        make = shown if callable(shown) else tqdm
        self._start = time.monotonic()
        self._input_tokens = self._output_tokens = 0
        self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, disable=not shown)

    def update(self, output: RequestOutput) -> None:
        self._input_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(sample.token_ids) for sample in output.outputs)
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input_tokens / seconds:.1f} toks/s, output: {self._output_tokens / seconds:.1f} toks/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C takes effect at the next border between steps, where the core is whole; a second one at once.

    Yields the check to make at each border. Outside the main thread, or under a handler of the user's own, nothing
    changes.
    """
    mine = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not mine:
        yield lambda: None
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            signal.default_int_handler(number, frame)
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
