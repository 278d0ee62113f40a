"""Which CPUs a thread may run on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from engine.errors import ConfigError


def bind_thread(cores: Sequence[int]) -> None:
    """Bind the calling thread, and those that it starts from now on, to the logical CPUs `cores`.

    Raises `ConfigError` where this process may not run on one of them, or the system cannot bind.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cores: this operating system does not bind threads to CPUs; leave it out")
    try:
        os.sched_setaffinity(0, cores)
        bound = os.sched_getaffinity(0)
    except OSError as error:
        raise ConfigError(f"cores: cannot bind to CPUs {list(cores)}: {error}") from error
    if bound != set(cores):
        raise ConfigError(f"cores: of CPUs {list(cores)} this process may run on {sorted(bound)} only")
