"""What ranks that compute one model do alike."""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.interface import CompiledModel
from engine.errors import EngineError
from engine.parallel.group import Group


def compiled_by_all(compile: Callable[[], CompiledModel], group: Group | None, device: torch.device) -> CompiledModel:
    """Raises where this rank could not compile, or another one, so that all run pieces or none does: where they
    rounded differently, routers could choose different experts."""
    if group is None:
        return compile()
    failed: Exception | None = None
    try:
        compiled = compile()
    except Exception as error:
        failed = error
    mine = torch.full((1, 1), float(failed is not None), device=device)
    failures = int(group.all_reduce(mine, None, torch.float32, group.name).item())
    if failed is not None:
        raise failed
    if failures:
        raise EngineError(f"{failures} of the other ranks could not compile")
    return compiled
