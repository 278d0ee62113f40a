"""Steps of a flat program that are native calls throughout become one native call (`csrc/tape.h`).

Between two layers an interpreter's own code and data would have to come from memory again, because the weights stream
through the caches: at one row that is a quarter of a step. Pieces of other operators stay as they are, and so does what
an observer is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx

from attention_backends.op import ATTENTION_OP
from compilation.split import Call, Fused, Step
from compilation.trace import Traced, value_of
from engine.cpu_kernels.tape_program import (
    NativeLayerOf,
    NotNativeError,
    TapeProgram,
    is_allocation,
    is_join,
    is_view,
    native_name,
)

logger = logging.getLogger(__name__)

StepsOf = Callable[[], list[Tensor]]
"""the current step, as the attention's native functions take it; each says which of them (`NativeLayer.step`)"""


def fuse_native_steps(layer_of: NativeLayerOf, steps_of: StepsOf) -> Callable[[Traced, Sequence[Step]], Sequence[Step]]:
    """For `compile_model`: every run of two or more steps that are native throughout, as one. What `layer_of` returned
    is kept as long as the functions that were made."""

    def fuse(traced: Traced, steps: Sequence[Step]) -> Sequence[Step]:
        fused: list[Step] = []
        later = list(steps)
        for native, group in groupby(steps, lambda step: _is_native(step, layer_of)):
            run = list(group)
            del later[: len(run)]
            fused += _fused(traced, run, later, layer_of, steps_of) if native and len(run) > 1 else run
        return fused

    return fuse


def _is_native(step: Step, layer_of: NativeLayerOf) -> bool:
    if isinstance(step, Call):
        return step.op == ATTENTION_OP and isinstance(step.args[-1], int) and layer_of(step.args[-1]) is not None
    if isinstance(step, Fused):
        return False
    nodes = [node for node in step.module.graph.nodes if node.op not in ("placeholder", "output")]
    return all(native_name(node) or is_allocation(node) or is_view(node) or is_join(node) for node in nodes)


def _fused(
    traced: Traced, run: list[Step], later: Sequence[Step], layer_of: NativeLayerOf, steps_of: StepsOf
) -> list[Step]:
    """What takes the place of `run`, where `later` steps follow."""
    program = TapeProgram(traced.weights, layer_of)
    try:
        for step in run:
            program.read(step)
        return [_as_one(program, traced.output, later, steps_of)]
    except NotNativeError as error:
        logger.info("a part of the model has no native form, so its layers are called one by one: %s", error)
        return run


def _as_one(program: TapeProgram, output: fx.Node, later: Sequence[Step], steps_of: StepsOf) -> Fused:
    read = {node for step in later for node in (step.reads if isinstance(step, Call) else step.inputs)} | {output}
    outputs = tuple(node for node in program.made if node in read)
    numbers, reals = program.finish(outputs)
    labels = program.labels()
    ops = getattr(torch.ops, program.namespace)
    tape = ops.make_tape.default(program.tensors, numbers, reals)
    run_tape = ops.run_tape.default
    shapes = [tuple(int(dim) for dim in _tensor_of(node).shape[1:]) for node in outputs]

    def run(arguments: list[Any], times: Tensor | None) -> Sequence[Tensor]:
        size, *inputs = arguments
        arguments.clear()
        flat = [x if x.dim() == 2 else x.flatten(1) for x in inputs]
        results = run_tape(tape, flat, steps_of(), times)
        return [
            result if len(shape) == 1 else result.view(size, *shape)
            for result, shape in zip(results, shapes, strict=True)
        ]

    def function(arguments: list[Any], _holds: object = program) -> Sequence[Tensor]:
        return run(arguments, None)

    def timed(arguments: list[Any]) -> tuple[Sequence[Tensor], list[tuple[str, int]]]:
        times = torch.empty(len(labels) + 1, dtype=torch.int64)
        outputs = run(arguments, times)
        return outputs, list(zip(labels, times.tolist(), strict=False))

    return Fused(tuple(program.inputs), outputs, function, timed, program.weights_of_labels())


def _tensor_of(node: Any) -> Tensor:
    value = value_of(node)
    assert isinstance(value, Tensor)
    return value
