"""A program as many graphs: every piece is captured, and the calls between them (attention) run eagerly at replay.

Why memory may be reused as freely as it is here. Capturing runs the flat program once, and the program drops each value
at its last use, so the pool may give the value's memory to whatever is captured later. A replay executes the same
pieces and calls in the same order on one stream: whatever overwrites a value comes after its last reader, as it did
when the memory was given away. That holds within one program by the program's `del`s, and between programs (other
sizes, other routes) because nothing but the output lives on when a replay has ended, and the output only until the next
replay of any program of the pool. So nothing here owns memory of the pool: graphs hold addresses (and keep the pool
itself from being returned to the system), and the calls' arguments and the output are aliases that do not own. If they
owned, q, k, v and the attention output of every layer of every size would stay allocated: gigabytes instead of one
layer's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from compilation.errors import CompileError
from compilation.graphs.capture import Capturer
from compilation.graphs.weak import weak_alias
from compilation.interface import BoundFunction, PieceFunction, Rewire


class PiecewiseGraph:
    """One program at one size: `replay` queues pieces and calls in order and returns what the program returned."""

    def __init__(self, steps: Sequence[Callable[[], object]], output: Tensor) -> None:
        self._steps = tuple(steps)
        self._output = output

    def __len__(self) -> int:
        return len(self._steps)

    def replay(self) -> Tensor:
        """[size, …]; overwritten by the next replay of any graph of the same pool."""
        for step in self._steps:
            step()
        return self._output


def capture_pieces(rewire: Rewire, inputs: Sequence[Tensor], capturer: Capturer) -> PiecewiseGraph:
    """Capture each piece of the program over `inputs`, whose memory the caller keeps. Calls are noted, not made.

    Raises CompileError for a call whose result the program uses: a call that is not made has none.
    """
    recorder = _Recorder(capturer)
    output = rewire(recorder.piece, recorder.call)(*inputs)
    return PiecewiseGraph(recorder.steps, weak_alias(output))


class _Recorder:
    """Wraps the program's functions; what its wrappers see, in order, becomes `steps`."""

    def __init__(self, capturer: Capturer) -> None:
        self.steps: list[Callable[[], object]] = []
        self._capturer = capturer

    def piece(self, function: PieceFunction) -> PieceFunction:
        def captured(arguments: list[Any]) -> Sequence[Any]:
            if any(argument is _NO_RESULT for argument in arguments):
                raise CompileError(
                    "a piece reads what a split op returns; piecewise graphs need split ops that write into an argument"
                )
            # the list is passed on as it is: the piece empties it, and with it goes the last owner of dead inputs
            handle, outputs = self._capturer.capture(partial(function, arguments))
            self.steps.append(handle.replay)
            return outputs

        return captured

    def call(self, function: BoundFunction) -> BoundFunction:
        def noted(*args: Any, **kwargs: Any) -> object:
            aliases = {name: _alias(value) for name, value in kwargs.items()}
            self.steps.append(partial(function, *map(_alias, args), **aliases))
            return _NO_RESULT

        return noted


_NO_RESULT = object()


def _alias(value: object) -> object:
    if isinstance(value, Tensor):
        return weak_alias(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_alias, value))
    return value
