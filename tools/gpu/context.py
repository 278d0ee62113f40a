"""What a part gets, and how its results reach the parent even when it is killed: one JSON line per finding."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TextIO

from gpu.device import Device

ROOT = Path(__file__).resolve().parents[2]


class UnavailableError(Exception):
    """This part cannot run here; the message says what is missing. No failure."""


@dataclass
class Context:
    """One part's run."""

    device: Device
    deadline: float
    """on `time.monotonic`'s clock; a part that can stop early does so before it"""
    cache_dir: Path
    """compiled kernels and pieces, shared by all parts"""
    scratch: Path
    """a folder of this part's own"""
    out: TextIO
    failures: int = field(default=0)

    @property
    def dry(self) -> bool:
        return self.device.dry

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def figure(self, key: str, value: object) -> None:
        """One measured value or row under `key`; the same key again makes a list."""
        self._write({"figure": key, "value": value})

    def check(self, name: str, problem: str | None, note: str = "") -> None:
        """One check: passed where `problem` is None."""
        self.failures += problem is not None
        self._write({"check": name, "problem": problem, "note": note})

    def skipped(self, name: str, reason: str) -> None:
        """Something this part would have done, and why it did not."""
        self._write({"skipped": name, "reason": reason})

    def out_of_time(self, name: str, need_s: float) -> bool:
        """True, and reported, where less than `need_s` is left for `name`."""
        if self.left_s() >= need_s:
            return False
        self.skipped(name, "no time")
        return True

    def _write(self, line: dict[str, object]) -> None:
        self.out.write(json.dumps(line, default=str) + "\n")
        self.out.flush()
        os.fsync(self.out.fileno())


def pretending() -> AbstractContextManager[object]:
    """Inside, `torch.cuda` has the tests' pretend GPU. Pieces run as traced: Inductor's code for a CPU is nothing that
    a GPU would run."""
    pretend: AbstractContextManager[object] = load_test_module("pretend_gpu", "pretend_gpu").pretend_gpu(inductor=False)
    return pretend


def load_test_module(room: str, name: str) -> ModuleType:
    """A helper module of `tests/<room>`: the suite checks with the oracles that the tests use.

    Raises UnavailableError where the tree has no such module.
    """
    folder = ROOT / "tests" / room
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UnavailableError(f"tests/{room}/{name}.py cannot be imported: {error}") from error
