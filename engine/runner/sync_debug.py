"""A debug mode: what makes the host wait for the device inside a steady step is an error, not a slow step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.step import StepPlan


def is_steady_decode(plan: StepPlan) -> bool:
    """Every row computes one token and none is new: the step that repeats thousands of times. Uploading a new row's
    parameters is not part of it."""
    return len(plan.rows) > 0 and not plan.added and bool((plan.rows.query_lens == 1).all())


@contextmanager
def hidden_syncs_are_errors() -> Iterator[None]:
    """torch raises where an operator waits for the device: `.item()`, boolean indexing, copies of pageable memory.

    Waiting for an event by its own method is explicit and stays allowed. The setting is the process's; it is put back.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
