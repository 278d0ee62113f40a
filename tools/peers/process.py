"""An engine in a process of its own: started, asked, paused so that it uses no CPU, and ended, whatever its state."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import psutil

from entrypoints.bench.metrics import Figures

ERROR_TAIL_CHARS = 600


class EngineFailedError(Exception):
    """The engine died, hung or reported an error; the message says which, with the end of what it printed."""


class Running(Protocol):
    """A started engine."""

    startup_s: float
    """process start to first token"""
    versions: dict[str, str]
    facts: dict[str, Any]

    def measure(self, workload: str, repeat: int, timeout_s: float) -> Figures: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def peak_memory_bytes(self) -> int: ...
    def stop(self) -> None: ...


class ProcessTree:
    """A child in a session of its own, with all that it starts."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, piped: bool) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._peaks: dict[int, int] = {}
        self._paused = False
        pipe = subprocess.PIPE if piped else None
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            list(command),
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or self._log,
            stderr=self._log,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log_tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return text[-ERROR_TAIL_CHARS:]

    def pause(self) -> None:
        self.peak_memory_bytes()
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._paused = False

    def peak_memory_bytes(self) -> int:
        """Sum over the tree of each process's own peak (VmHWM). Processes that ended keep the last value seen."""
        for member in self._members():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{member.pid}/status") as status:
                    line = next((line for line in status if line.startswith("VmHWM:")), "VmHWM: 0 kB")
                self._peaks[member.pid] = int(line.split()[1]) * 1024
        return sum(self._peaks.values())

    def stop(self, patience_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL for what is left. A second call does nothing."""
        if self._log.closed:
            return
        self.peak_memory_bytes()
        members = self._members()
        if self._paused:
            self.resume()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self._signal(signal.SIGTERM)
        _, left = psutil.wait_procs(members, timeout=patience_s)
        for member in left:
            with contextlib.suppress(psutil.Error):
                member.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self._log.close()

    def _members(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for member in self._members():
            with contextlib.suppress(psutil.Error):
                member.send_signal(number)


class Worker:
    """`worker.py` with an adapter, over stdin and stdout. Raises `EngineFailedError` when it is not ready in time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        self._tree = ProcessTree(command, environment, piped=True)
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        ready = self._answer(timeout_s, "to load")
        self.startup_s = time.perf_counter() - self._tree.started
        try:
            self.versions, self.facts = ready["ready"]["versions"], ready["ready"]["facts"]
        except KeyError:
            self.stop()
            raise EngineFailedError(f"its first line is not a ready message: {ready}") from None

    def measure(self, workload: str, repeat: int, timeout_s: float) -> Figures:
        stdin = self._tree.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"workload": workload, "repeat": repeat}).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):  # ValueError: it was stopped
            self._fail("is not running")
        answer = self._answer(timeout_s, workload)
        if "figures" not in answer:
            raise EngineFailedError(str(answer.get("error", answer)))
        figures: Figures = answer["figures"]
        return figures

    def pause(self) -> None:
        self._tree.pause()

    def resume(self) -> None:
        self._tree.resume()

    def peak_memory_bytes(self) -> int:
        return self._tree.peak_memory_bytes()

    def stop(self) -> None:
        self._tree.stop()

    def _read(self) -> None:
        assert self._tree.process.stdout is not None
        for raw in self._tree.process.stdout:
            self._answers.put(raw.decode(errors="replace"))
        self._answers.put(None)

    def _answer(self, timeout_s: float, doing: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._fail(f"gave no answer within {timeout_s:.0f} s ({doing})")
        if line is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._tree.process.wait(5)
            self._fail(f"exited with status {self._tree.process.poll()} ({doing})")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._fail(f"answered with something else than a JSON object ({doing}): {line[:200]!r}")
        return answer

    def _fail(self, what: str) -> NoReturn:
        tail = self._tree.log_tail()
        self.stop()
        raise EngineFailedError(f"{what}; it last printed: {tail}" if tail else what)
