"""The program of a step that is watched: the runner's own with an observer's wrappers around pieces and attention.

Made at the first watched step and again when the runner's program has changed; a step that is not watched never passes
through here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from compilation.interface import CompiledModel
from engine.observability.step_profile import StepObserver
from engine.runner.loading import Attend, CausalModel

Program = Callable[..., torch.Tensor]


class ObservedProgram:
    """For one observer and one model."""

    def __init__(self, observer: StepObserver, model: CausalModel, attend: Attend) -> None:
        self._observer = observer
        self._model = model
        self._attend = attend
        self._watched_attend: Attend = observer.wrap_call(attend)
        self._of: CompiledModel | None = None
        self._compiled: Program | None = None

    def program(self, compiled: CompiledModel | None) -> Program:
        """Of the compiled model, or of the model as it is where there is none."""
        if compiled is None:
            return self._eager
        if self._compiled is None or self._of is not compiled:
            self._of = compiled
            self._compiled = compiled.rewire(
                self._observer.wrap_piece, self._observer.wrap_call, self._observer.wrap_fused
            )
        return self._compiled

    def _eager(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._model.set_attention(self._watched_attend)
        try:
            return self._model(input_ids, positions)
        finally:
            self._model.set_attention(self._attend)
