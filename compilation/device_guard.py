"""Keeps a CUDA build of torch from crashing when it traces on a machine without a GPU."""

from __future__ import annotations

import threading
from functools import cache

import torch


@cache
def keep_device_guard_alive() -> None:
    """To be called before tracing; once per process is enough.

    Without a GPU, tracing makes torch put a stand-in for its CUDA device guard into a table of the process. In torch
    2.11 the stand-in is a thread's own: once the thread that traced first has ended, the next trace follows a pointer
    to memory that is gone. So it is made here, by a thread that never ends. Nothing is done where there is a GPU, or in
    a CPU build.
    """
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    made = threading.Event()

    def make_and_stay() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        made.set()
        threading.Event().wait()

    threading.Thread(target=make_and_stay, name="device-guard", daemon=True).start()
    made.wait()
