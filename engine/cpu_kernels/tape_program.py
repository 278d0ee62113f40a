"""What a tape does, in the numbers that `make_tape` takes: read from the graphs of a flat program's steps.

Values are rows of bfloat16. Each has a place: an input or a result of the tape, or scratch memory, which values share
that are never needed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from attention_backends.interface import NativeLayer
from compilation.split import Call, Piece, Step
from compilation.trace import is_scalar, value_of

NativeLayerOf = Callable[[int], NativeLayer | None]

NONE = -1
_INPUT, _RESULT, _SCRATCH = range(3)
_MATRIX, _ROTATION = range(2)
_LINE = 64
"""bytes: places in scratch memory start at multiples"""
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_VIEWS = frozenset({"flatten", "unflatten", "view", "reshape", "split", "chunk", "narrow", "getitem"})

Reference = tuple[int, int]
"""a value, and its first column that is meant"""


class NotNativeError(Exception):
    """A step has something in it that a tape cannot hold; the message says what."""


def native_name(node: fx.Node) -> str:
    """ "" where it is no operator that a tape has."""
    target = node.target
    if not isinstance(target, OpOverload) or not target.namespace.startswith("pageloom_linear"):
        return ""
    name = str(target._schema.name).partition("::")[2]
    return name if name in ("packed_linear", "rotate_heads") else ""


def is_allocation(node: fx.Node) -> bool:
    return _name(node) in _ALLOCATIONS


def is_view(node: fx.Node) -> bool:
    """Or a number of the host."""
    return _name(node) in _VIEWS or is_scalar(node)


@dataclass
class _Value:
    columns: int
    is_input: bool
    first: int
    """call that makes it"""
    last: int
    """call that reads it last"""


@dataclass
class _Call:
    is_attention: bool
    numbers: list[int | Reference]
    eps: float = 0.0
    weights: Sequence[int] = ()
    """among the tensors"""
    shape: tuple[object, ...] = ()
    """equal where the same is computed with other weights"""


class TapeProgram:
    """Read steps in order, then `finish`. Holds what the tape points to."""

    def __init__(self, weights: Mapping[fx.Node, Tensor], layer_of: NativeLayerOf) -> None:
        self.namespace = ""
        self.inputs: list[fx.Node] = []
        self.made: list[fx.Node] = []
        """nodes of the traced graph that later steps may read"""
        self.tensors: list[Tensor] = []
        self._weights = weights
        self._layer_of = layer_of
        self._layers: list[NativeLayer] = []
        self._values: list[_Value] = []
        self._calls: list[_Call] = []
        self._of_storage: dict[int, int] = {}
        """storages of fake tensors that the tape makes"""
        self._of_input: dict[fx.Node, int] = {}

    def read(self, step: Step) -> None:
        """Raises NotNativeError."""
        if isinstance(step, Call):
            self._attention(step)
        else:
            assert isinstance(step, Piece)
            self._piece(step)

    def _attention(self, step: Call) -> None:
        *tensors, index = step.args
        native = self._layer_of(index) if isinstance(index, int) else None
        if native is None or step.kwargs:
            raise NotNativeError(f"attention of layer {index}")
        self._layers.append(native)
        q, k, v, out = (node for node in tensors if isinstance(node, fx.Node))
        references = [self._reference(node) for node in (q, k, v, out)]
        head = [native.function, self._tensor(native.layer), native.step, _columns(q), _columns(k)]
        self._calls.append(_Call(True, [*head, *references]))

    def _piece(self, step: Piece) -> None:
        graph = step.module.graph
        placeholders = graph.find_nodes(op="placeholder")[1:]  # the first is the number of rows
        sources = dict(zip(placeholders, step.inputs, strict=True))
        for node in graph.nodes:
            name = native_name(node)
            if name == "packed_linear":
                self._matrix(node, sources)
            elif name == "rotate_heads":
                self._rotation(node, sources)
            elif node.op != "output" and is_allocation(node):
                self._new(node)
            if name:
                self.namespace = node.target.namespace
        self.made += step.outputs

    def _matrix(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> None:
        x, weight, n, format, bias, norm, eps, residual, gate, wide, isa = node.args
        if wide or isa:
            raise NotNativeError(f"{node.name} is a layer of another kind")
        weights = [self._weight(argument, sources) for argument in (weight, bias, norm)]
        numbers = [_MATRIX, weights[0], n, _columns(x), format, weights[1], weights[2], gate]
        references = [self._reference(x, sources), self._optional(residual, sources), (self._new(node), 0)]
        self._calls.append(_Call(False, [*numbers, *references], float(eps), weights, (n, numbers[3], format)))  # type: ignore[arg-type, list-item]

    def _rotation(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> None:
        x, rope, q_norm, k_norm, eps, q_heads, k_heads, dim, residual = node.args
        weights = [self._weight(argument, sources) for argument in (q_norm, k_norm)]
        reference = self._reference(x, sources)
        assert isinstance(x, fx.Node)
        fresh = native_name(x) != "" and len(x.users) == 1
        if fresh and reference == (self._of_storage[_storage(x)], 0):
            self._of_storage[_storage(node)] = reference[0]  # in its place: nobody needs it as it was
            out = reference[0]
        else:
            out = self._new(node)
        rotary = 0 if rope is None else _columns(rope)
        numbers = [_ROTATION, _columns(node), q_heads, k_heads, dim, rotary, *weights]
        references = [reference, self._optional(rope, sources), self._optional(residual, sources), (out, 0)]
        self._calls.append(_Call(False, [*numbers, *references], float(eps), weights, ("rotation",)))  # type: ignore[arg-type, list-item]

    def _weight(self, argument: object, sources: Mapping[fx.Node, fx.Node]) -> int:
        if argument is None:
            return NONE
        weight = self._weights.get(sources[argument]) if argument in sources else None  # type: ignore[index]
        if weight is None:
            raise NotNativeError(f"{argument} is no weight of the model")
        return self._tensor(weight)

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _new(self, node: fx.Node) -> int:
        value = _tensor_at(node)
        if value.dtype != torch.bfloat16 or not value.is_contiguous() or value.storage_offset() != 0:
            raise NotNativeError(f"{node.name} is not plain rows of bfloat16")
        self._of_storage[_storage(node)] = len(self._values)
        self._values.append(_Value(_columns(node), False, len(self._calls), len(self._calls)))
        return len(self._values) - 1

    def _optional(self, node: object, sources: Mapping[fx.Node, fx.Node]) -> Reference:
        return (NONE, 0) if node is None else self._reference(node, sources)

    def _reference(self, node: object, sources: Mapping[fx.Node, fx.Node] | None = None) -> Reference:
        """Columns of a value. `sources`: of a piece's placeholders, the nodes of the traced graph; None: `node` is one
        of those."""
        assert isinstance(node, fx.Node)
        tensor = _tensor_at(node)
        if not _side_by_side(tensor):
            raise NotNativeError(f"{node.name} has gaps within a row")
        index = self._of_storage.get(_storage(node))
        if index is None:
            index, offset = self._input(node if sources is None else sources[_origin(node)]), 0
        else:
            offset = int(tensor.storage_offset())
            if tensor.stride(0) != self._values[index].columns:
                raise NotNativeError(f"{node.name} is not columns of a value")
        self._values[index].last = len(self._calls)
        return index, offset

    def _input(self, source: fx.Node) -> int:
        tensor = _tensor_at(source)
        if source in self._weights or tensor.dtype != torch.bfloat16 or not _side_by_side(tensor):
            raise NotNativeError(f"{source.name} is not an input of bfloat16 rows")
        if source not in self._of_input:
            self._of_input[source] = len(self._values)
            self._values.append(_Value(_columns(source), True, 0, 0))
            self.inputs.append(source)
        return self._of_input[source]

    def finish(self, outputs: Sequence[fx.Node]) -> tuple[list[int], list[float]]:
        """The program and the norms' epsilons; `outputs`: nodes whose values are the results."""
        results: dict[int, int] = {}
        for node in outputs:
            index = self._of_storage.get(_storage(node), NONE)
            if index == NONE or _columns(node) != self._values[index].columns or index in results:
                raise NotNativeError(f"{node.name} is not a value of its own")
            results[index] = len(results)
        numbers = [len(self._values)]
        for index, place in enumerate(self._places(results)):
            numbers += [self._values[index].columns, *place]
        steps = self._steps()
        numbers.append(len(steps))
        for calls in steps:
            numbers.append(0 if calls[0].is_attention else len(calls))
            for call in calls:
                for number in call.numbers:
                    numbers += number if isinstance(number, tuple) else [number]
        return numbers, [call.eps for call in self._calls if not call.is_attention]

    def labels(self) -> list[str]:
        """Of each step: steps that multiply by matrices of the same shapes are the same."""
        known: dict[tuple[object, ...], str] = {}
        return [
            "attention"
            if calls[0].is_attention
            else known.setdefault(tuple(call.shape for call in calls), f"layers {len(known)}")
            for calls in self._steps()
        ]

    def weights_of_labels(self) -> dict[str, list[Tensor]]:
        """What the first step of each label reads; attention reads none."""
        reads: dict[str, list[Tensor]] = {}
        for label, calls in zip(self.labels(), self._steps(), strict=True):
            if label not in reads and not calls[0].is_attention:
                reads[label] = [self.tensors[index] for call in calls for index in call.weights if index != NONE]
        return reads

    def _steps(self) -> list[list[_Call]]:
        """Layers between two attentions together."""
        steps: list[list[_Call]] = []
        for call in self._calls:
            if steps and not call.is_attention and not steps[-1][0].is_attention:
                steps[-1].append(call)
            else:
                steps.append([call])
        return steps

    def _places(self, results: Mapping[int, int]) -> list[tuple[int, int]]:
        """(kind, index) of each value; scratch memory at the lowest byte where nothing lies meanwhile."""
        inputs = {index: i for i, index in enumerate(self._of_input.values())}
        placed: list[tuple[_Value, int, int]] = []
        places = []
        for index, value in enumerate(self._values):
            if value.is_input:
                places.append((_INPUT, inputs[index]))
            elif index in results:
                places.append((_RESULT, results[index]))
            else:
                size = -(-2 * value.columns // _LINE) * _LINE
                beside = [(a, b) for v, a, b in placed if v.first <= value.last and value.first <= v.last]
                at = min(
                    start
                    for start in (0, *(b for _, b in beside))
                    if all(start + size <= a or b <= start for a, b in beside)
                )
                placed.append((value, at, at + size))
                places.append((_SCRATCH, at))
        return places


def _origin(node: fx.Node) -> fx.Node:
    """The placeholder whose rows a node only shapes anew."""
    columns = _columns(node)
    while node.op != "placeholder":
        source = node.args[0]
        if _name(node) not in _VIEWS or not isinstance(source, fx.Node) or _columns(source) != columns:
            raise NotNativeError(f"{node.name} is no whole input")
        node = source
    return node


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _tensor_at(node: fx.Node) -> Tensor:
    value = value_of(node)
    if not isinstance(value, Tensor):
        raise NotNativeError(f"{node.name} is not a tensor")
    return value


def _storage(node: fx.Node) -> int:
    return int(_tensor_at(node).untyped_storage()._cdata)


def _columns(node: object) -> int:
    assert isinstance(node, fx.Node)
    return math.prod(int(dim) for dim in _tensor_at(node).shape[1:])


def _side_by_side(tensor: Tensor) -> bool:
    """Whether a row has no gaps."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= int(size)
    return True
