"""`pageloom::Stage` and `pageloom::NativeAttention` as ctypes has them: for tests that call native attention, or stand
in for it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

KINDS = 6
"""`kNativeStages`"""


class NativeRows(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k", ctypes.c_void_p),
        ("k_stride", ctypes.c_int64),
        ("v", ctypes.c_void_p),
        ("v_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
    )


class Stage(ctypes.Structure):
    _fields_ = (
        ("work", ctypes.c_void_p),
        ("units", ctypes.c_int64),
        ("workers", ctypes.c_int64),
        ("ahead", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("_to_line_1", ctypes.c_char * 24),
        ("next", ctypes.c_int64),
        ("_to_line_2", ctypes.c_char * 56),
        ("done", ctypes.c_int64),
        ("_to_line_3", ctypes.c_char * 56),
    )


Work = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(Stage), ctypes.c_int64, ctypes.c_void_p)
Stages = ctypes.c_void_p * KINDS
Prepare = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.POINTER(NativeRows),
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.POINTER(Stages),
)


class NativeAttention(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_int64), ("prepare", ctypes.c_void_p))


def text_at(address: int | None) -> str | None:
    return None if address is None else ctypes.string_at(address).decode()


class Call:
    """The stages of one call of the native attention at `functions`, which is kept until this goes."""

    def __init__(self, functions: int, layer: int | None, step: int | None, rows: NativeRows, run: int = 0) -> None:
        self.holds: Any = None
        """what layer and step point to"""
        table = NativeAttention.from_address(functions)
        self._memory = ctypes.create_string_buffer(table.bytes + 64)
        memory, made = (ctypes.addressof(self._memory) + 63) // 64 * 64, Stages()
        self.refusal = text_at(Prepare(table.prepare)(layer, step, rows, 1, run or next(_runs), memory, made))
        self.stages = [Stage.from_address(address) for address in made if address is not None]

    def run(self) -> str | None:
        """Alone. The refusal, or a stage's error, or None."""
        for stage in self.stages if self.refusal is None else ():
            Work(stage.work)(ctypes.byref(stage), 0, ctypes.byref(_TURN))
            if stage.error is not None:
                return text_at(stage.error)
            assert stage.done == stage.units
        return self.refusal


_runs = itertools.count(1000)
_ALONE = (ctypes.c_int64 * 2)(1, 0)
"""`pageloom::Threads`: one, and no crew"""
_FAILED = ctypes.c_bool(False)
_TURN = (ctypes.c_void_p * 3)(ctypes.addressof(_ALONE), ctypes.addressof(_FAILED))
"""`pageloom::Turn`"""


class PretendAttention:
    """Calls `attend(layer, step, rows)` in the place of an attention; the error that it returns or raises goes back: a
    stage that took its unit and does not finish it would be waited for without end."""

    def __init__(self, attend: Callable[[int, int, NativeRows], bytes | None]) -> None:
        self._kept: list[Any] = []

        def prepare(layer: int, step: int, rows: Any, threads: int, run: int, memory: int, stages: Any) -> None:
            given = NativeRows.from_buffer_copy(rows.contents)

            def work(at: Any, me: int, turn: int) -> bool:
                stage = at.contents
                if stage.next == 0:
                    stage.next = 1
                    try:
                        error = attend(layer, step, given)
                    except Exception as raised:
                        error = repr(raised).encode()
                    if error is not None:
                        self._kept.append(ctypes.create_string_buffer(error))
                        stage.error = ctypes.addressof(self._kept[-1])
                    stage.done = 1
                return True

            self._kept.append(Work(work))
            function = ctypes.cast(self._kept[-1], ctypes.c_void_p).value
            ctypes.memmove(memory, ctypes.byref(Stage(work=function, units=1, workers=1)), ctypes.sizeof(Stage))
            stages.contents[0] = memory

        self._prepare = Prepare(prepare)
        self._table = NativeAttention(ctypes.sizeof(Stage), ctypes.cast(self._prepare, ctypes.c_void_p).value)
        self.address: int = ctypes.addressof(self._table)
