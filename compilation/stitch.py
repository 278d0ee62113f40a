"""The flat program: one generated Python function that calls pieces and bound functions in order.

Why generated source and `exec`, here and nowhere else: a closure program (a list of steps over a table of values) costs
about a microsecond per value moved, source costs a local variable. The text is made of fixed templates, numbers and
names that this file invents; nothing of a model or a user enters it. Weights and functions are globals of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from compilation.interface import BoundFunction, PieceFunction, WrapCall, WrapFused, WrapPiece
from compilation.split import Call, Fused, Piece, Step
from compilation.trace import Traced


def _as_it_is(step: Fused) -> PieceFunction:
    return step.function


@dataclass(frozen=True)
class Stitched:
    """The generated code and the globals that it names; programs made of it share nothing but those."""

    code: CodeType
    values: Mapping[str, Any]
    pieces: frozenset[str]
    """names among `values` that are pieces"""
    calls: frozenset[str]
    """names among `values` that are bound functions"""
    fused: Mapping[str, Fused]
    """of the names among `values` that are such functions"""

    def run(self) -> Callable[..., Tensor]:
        """`run(*inputs) -> Tensor`. A value is dropped at its last use: a piece frees or reuses its memory at once."""
        return self._program(dict(self.values))

    def rewire(
        self, wrap_piece: WrapPiece, wrap_call: WrapCall, wrap_fused: WrapFused = _as_it_is
    ) -> Callable[..., Tensor]:
        """`run` with its functions wrapped; `run` itself never pays for the possibility."""
        values = dict(self.values)
        values.update({name: wrap_fused(step) for name, step in self.fused.items()})
        values.update({name: wrap_piece(values[name]) for name in self.pieces})
        values.update({name: wrap_call(values[name]) for name in self.calls})
        return self._program(values)

    def _program(self, values: dict[str, Any]) -> Callable[..., Tensor]:
        exec(self.code, values)
        run: Callable[..., Tensor] = values["run"]
        return run


def stitch(
    traced: Traced,
    steps: Sequence[Step],
    functions: Mapping[Piece, PieceFunction],
    bind: Mapping[str, BoundFunction],
) -> Stitched:
    """The program of `steps`, its pieces and bound functions among its globals."""
    program = _Program(traced)
    last_use = _last_uses(traced, steps)
    for index, step in enumerate(steps):
        dead = [node for node, at in last_use.items() if at == index]
        if isinstance(step, Piece):
            program.piece(step, functions[step], dead)
        elif isinstance(step, Fused):
            program.fused(step, dead)
        else:
            program.call(step, bind[step.op], dead)
    return program.finish()


def _reads(step: Step) -> tuple[fx.Node, ...]:
    return step.reads if isinstance(step, Call) else step.inputs


def _last_uses(traced: Traced, steps: Sequence[Step]) -> dict[fx.Node, int]:
    """Step after which a value is dead. A value that nobody reads dies where it is made; the output never does."""
    last: dict[fx.Node, int] = {}
    for index, step in enumerate(steps):
        made = step.outputs if not isinstance(step, Call) else (step.result,) if step.result is not None else ()
        last.update(dict.fromkeys(made, index))
        last.update({node: index for node in _reads(step) if node in last or node in traced.inputs})
    last.pop(traced.output, None)
    last.pop(traced.size, None)
    return last


class _Program:
    """Source lines, and the globals that they name."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._globals: dict[str, Any] = {"_mismatch": _mismatch, "_set_grad": torch._C._set_grad_enabled}
        self._globals["_grad_mode"] = torch.is_grad_enabled
        self._names: dict[fx.Node, str] = {traced.size: "n"}
        parameters = [f"i{index}" for index in range(len(traced.inputs))]
        for name, node in zip(parameters, traced.inputs, strict=True):
            if node is not None:
                self._names[node] = name
        for index, (node, weight) in enumerate(traced.weights.items()):
            self._names[node] = f"w{index}"
            self._globals[f"w{index}"] = weight
        self._parameters = ", ".join(parameters)
        self._pieces: set[str] = set()
        self._calls: set[str] = set()
        self._fused: dict[str, Fused] = {}
        self._lines = ["n = i0.size(0)"]
        if len(parameters) > 1:
            differs = " or ".join(f"{name}.size(0) != n" for name in parameters[1:])
            self._lines.append(f"if {differs}: _mismatch({self._parameters})")

    def piece(self, step: Piece, function: PieceFunction, dead: Sequence[fx.Node]) -> None:
        name = self._constant("p", function)
        self._pieces.add(name)
        self._boxed_call(step, name, dead)

    def fused(self, step: Fused, dead: Sequence[fx.Node]) -> None:
        name = self._constant("s", step.function)
        self._fused[name] = step
        self._boxed_call(step, name, dead)

    def _boxed_call(self, step: Piece | Fused, name: str, dead: Sequence[fx.Node]) -> None:
        inputs = ", ".join(["n", *(self._names[node] for node in step.inputs)])
        self._lines.append(f"a = [{inputs}]")
        self._drop([node for node in dead if node not in step.outputs])
        targets = "".join(f"{self._new(node)}, " for node in step.outputs)
        self._lines.append(f"{targets or '_, '}= {name}(a)" if step.outputs else f"{name}(a)")
        self._drop([node for node in dead if node in step.outputs])

    def call(self, step: Call, function: BoundFunction, dead: Sequence[fx.Node]) -> None:
        name = self._constant("f", function)
        self._calls.add(name)
        arguments = [self._argument(value) for value in step.args]
        arguments += [f"{key}={self._argument(value)}" for key, value in step.kwargs.items()]
        target = "" if step.result is None else f"{self._new(step.result)} = "
        self._lines.append(f"{target}{name}({', '.join(arguments)})")
        self._drop(dead)

    def finish(self) -> Stitched:
        """Gradients are off within; a caller in inference mode or under no_grad pays only for the question."""
        body = "\n        ".join([*self._lines, f"return {self._names[self._traced.output]}"])
        source = (
            f"def run({self._parameters}):\n"
            "    grad = _grad_mode()\n"
            "    if grad: _set_grad(False)\n"
            f"    try:\n        {body}\n"
            "    finally:\n"
            "        if grad: _set_grad(True)\n"
        )
        code = compile(source, "<compilation.stitch>", "exec")
        return Stitched(code, self._globals, frozenset(self._pieces), frozenset(self._calls), self._fused)

    def _new(self, node: fx.Node) -> str:
        return self._names.setdefault(node, f"v{len(self._names)}")

    def _constant(self, prefix: str, value: object) -> str:
        for name, known in self._globals.items():
            if known is value and name.startswith(prefix):
                return name
        name = f"{prefix}{len(self._globals)}"
        self._globals[name] = value
        return name

    def _argument(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._argument(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if value else ''})"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._constant("c", value)

    def _drop(self, nodes: Sequence[fx.Node]) -> None:
        if nodes:
            self._lines.append(f"del {', '.join(self._names[node] for node in nodes)}")


def _mismatch(*inputs: Tensor) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
    raise ValueError(f"inputs of a compiled model share the size of dimension 0; got {shapes}")
