"""What a tape does, in the numbers that `make_tape` takes: read from the graphs of a flat program's steps.

A call of one of our operators is its arguments, in the order of its schema, and then its results. Values are rows; each
has a place: an input or a result of the tape, or scratch memory, which values share that are never needed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from attention_backends.interface import NativeLayer
from compilation.split import Call, Piece, Step
from compilation.trace import is_scalar, value_of

NativeLayerOf = Callable[[int], NativeLayer | None]

NONE = -1
_INPUT, _RESULT, _SCRATCH = range(3)
_ATTENTION = 0
_ROTATION = 2
_SUM = 5
_OPERATORS = {
    "packed_linear": 1,
    "rotate_heads": _ROTATION,
    "route": 3,
    "packed_experts": 4,
    "all_reduce": _SUM,
    "adapted_linear": 6,
}
"""numbers as in `csrc/tape_binding.cpp`"""
_NAMESPACES = ("pageloom_linear", "pageloom_parallel")
_SIZES = {torch.bfloat16: 2, torch.float32: 4, torch.int32: 4}
"""bytes of what values are made of"""
_LINE = 64
"""bytes: places in scratch memory start at multiples"""
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty"})
_VIEWS = frozenset({"flatten", "unflatten", "view", "reshape", "split", "chunk", "narrow", "getitem"})

_ROWS = frozenset({"x", "rope", "residual", "logits", "ids", "weights"})
"""operators' tensors that are values; the others are weights"""


class NotNativeError(Exception):
    """A step has something in it that a tape cannot hold; the message says what."""


def native_name(node: fx.Node) -> str:
    """ "" where it is no operator that a tape has."""
    target = node.target
    if not isinstance(target, OpOverload) or not target.namespace.startswith(_NAMESPACES):
        return ""
    name = str(target._schema.name).partition("::")[2]
    return name if name in _OPERATORS else ""


def is_allocation(node: fx.Node) -> bool:
    return _name(node) in _ALLOCATIONS


def is_view(node: fx.Node) -> bool:
    """Or a number of the host."""
    return _name(node) in _VIEWS or is_scalar(node)


def is_join(node: fx.Node) -> bool:
    """Outputs of layers that lie side by side, and are nothing else: each layer writes its part."""
    return _name(node) == "cat" and all(_join_of(part) is node for part in _parts(node))


def _join_of(node: fx.Node) -> fx.Node | None:
    """Of which a layer's output is a part."""
    user = next(iter(node.users), None)
    if len(node.users) != 1 or user is None or native_name(node) != "packed_linear" or _name(user) != "cat":
        return None
    dim = user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else 0)
    return (
        user if dim in (-1, 1) and _tensor_at(user).dim() == 2 and len(set(_parts(user))) == len(_parts(user)) else None
    )


def _parts(join: fx.Node) -> list[fx.Node]:
    parts = join.args[0] if join.args else ()
    return [part for part in parts if isinstance(part, fx.Node)] if isinstance(parts, list | tuple) else []


@dataclass
class _Value:
    columns: int
    size: int
    """bytes of an element"""
    is_input: bool
    first: int
    """call that makes it"""
    last: int
    """call that reads it last"""


@dataclass
class _Call:
    kind: int
    numbers: list[int]
    reals: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    """among the tensors"""
    shape: list[object] = field(default_factory=list)
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
        call = _Call(_ATTENTION, [native.function, self._tensor(native.layer), native.step])
        for node in tensors:
            call.numbers += self._columns_of(node)
        call.numbers += self._scratch(native.scratch_bytes)
        self._calls.append(call)

    def _scratch(self, bytes_a_row: int) -> list[int]:
        """Of the next call alone."""
        if not bytes_a_row:
            return [NONE, 0, 0]
        now, columns = len(self._calls), bytes_a_row // _SIZES[torch.float32]
        self._values.append(_Value(columns, _SIZES[torch.float32], False, now, now))
        return [len(self._values) - 1, 0, columns]

    def _piece(self, step: Piece) -> None:
        graph = step.module.graph
        placeholders = graph.find_nodes(op="placeholder")[1:]  # the first is the number of rows
        sources = dict(zip(placeholders, step.inputs, strict=True))
        for node in graph.nodes:
            if native_name(node):
                self._operator(node, sources)
            elif node.op != "output" and is_allocation(node):
                self._new(_tensor_at(node))
        self.made += step.outputs

    def _operator(self, node: fx.Node, sources: Mapping[fx.Node, fx.Node]) -> None:
        assert isinstance(node.target, OpOverload)
        call = _Call(_OPERATORS[native_name(node)], [])
        if call.kind == _SUM:
            self._sum(node, node.target, call, sources)
            return
        self.namespace = node.target.namespace
        for argument, declared in zip(node.args, node.target._schema.arguments, strict=True):
            if declared.name in _ROWS:
                columns = [NONE, 0, 0] if argument is None else self._columns_of(argument, sources)
                call.numbers += columns
                call.shape.append(columns[2])
            elif isinstance(declared.type, torch.TensorType | torch.OptionalType):
                call.weights.append(self._weight(argument, sources))
                call.numbers.append(call.weights[-1])
            elif isinstance(declared.type, torch.FloatType):
                call.reals.append(float(argument))  # type: ignore[arg-type]
            else:
                call.numbers.append(int(argument))  # type: ignore[arg-type]
                call.shape.append(argument)
        join = _join_of(node)
        for result in _tensors_at(node):
            value, offset = self._in_place(node, call) if call.kind == _ROTATION else None, 0
            if join is not None and is_join(join):
                value, offset = self._part(node, join)
            call.numbers += [self._new(result) if value is None else value, offset, _columns(result)]
        self._calls.append(call)

    def _sum(self, node: fx.Node, operator: OpOverload, call: _Call, sources: Mapping[fx.Node, fx.Node]) -> None:
        x, residual, _, group = node.args
        call.numbers += getattr(torch.ops, operator.namespace).native_all_reduce(group)
        for argument in (x, residual):
            call.numbers += [NONE, 0, 0] if argument is None else self._columns_of(argument, sources)
        columns = _columns(_tensor_at(node))
        call.numbers += [self._new(_tensor_at(node)), 0, columns]
        call.shape.append(columns)
        self._calls.append(call)

    def _part(self, node: fx.Node, join: fx.Node) -> tuple[int, int]:
        """The value that it is a part of, and from which column on."""
        before = _parts(join)[: _parts(join).index(node)]
        value = self._of_storage.get(_storage(join))
        if value is None:
            value = self._new(_tensor_at(join))
        return value, sum(_columns(_tensor_at(part)) for part in before)

    def _in_place(self, rotation: fx.Node, call: _Call) -> int | None:
        """The value that is turned where it lies, because nobody needs it as it was."""
        x = rotation.args[0]
        assert isinstance(x, fx.Node)
        value, offset, _ = call.numbers[:3]
        if (
            not (native_name(x) or is_join(x))
            or len(x.users) > 1
            or (value, offset) != (self._of_storage[_storage(x)], 0)
        ):
            return None
        self._of_storage[_storage(rotation)] = value
        return value

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

    def _new(self, value: Tensor) -> int:
        if value.dtype not in _SIZES or not value.is_contiguous() or value.storage_offset() != 0:
            raise NotNativeError(f"{value.dtype} {list(value.shape)} is not plain rows")
        self._of_storage[_memory(value)] = len(self._values)
        now = len(self._calls)
        self._values.append(_Value(_columns(value), _SIZES[value.dtype], False, now, now))
        return len(self._values) - 1

    def _columns_of(self, node: object, sources: Mapping[fx.Node, fx.Node] | None = None) -> list[int]:
        """Value, first column, columns. `sources`: of a piece's placeholders, the nodes of the traced graph; None:
        `node` is one of those."""
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
        return [index, offset, _columns(tensor)]

    def _input(self, source: fx.Node) -> int:
        tensor = _tensor_at(source)
        if source in self._weights or tensor.dtype != torch.bfloat16 or not _side_by_side(tensor):
            raise NotNativeError(f"{source.name} is not an input of bfloat16 rows")
        if source not in self._of_input:
            self._of_input[source] = len(self._values)
            self._values.append(_Value(_columns(tensor), _SIZES[tensor.dtype], True, 0, 0))
            self.inputs.append(source)
        return self._of_input[source]

    def finish(self, outputs: Sequence[fx.Node]) -> tuple[list[int], list[float]]:
        """The program and its real numbers; `outputs`: nodes whose values are the results."""
        results: dict[int, int] = {}
        for node in outputs:
            index = self._of_storage.get(_storage(node), NONE)
            tensor = _tensor_at(node)
            if index == NONE or _columns(tensor) != self._values[index].columns or index in results:
                raise NotNativeError(f"{node.name} is not a value of its own")
            if tensor.dtype != torch.bfloat16:
                raise NotNativeError(f"{node.name} is a result of {tensor.dtype}")
            results[index] = len(results)
        numbers = [len(self._values)]
        for index, place in enumerate(self._places(results)):
            numbers += [self._values[index].columns, self._values[index].size, *place]
        steps = self._steps()
        numbers.append(len(steps))
        for calls in steps:
            numbers.append(len(calls))
            for call in calls:
                numbers += [call.kind, *call.numbers]
        return numbers, [real for call in self._calls for real in call.reals]

    def labels(self) -> list[str]:
        """Of each step: steps that multiply by matrices of the same shapes are the same."""
        known: dict[object, str] = {}
        return [
            "attention"
            if calls[0].kind == _ATTENTION
            else known.setdefault(repr([(call.kind, call.shape) for call in calls]), f"layers {len(known)}")
            for calls in self._steps()
        ]

    def weights_of_labels(self) -> dict[str, list[Tensor]]:
        """What the first step of each label reads; attention reads none."""
        reads: dict[str, list[Tensor]] = {}
        for label, calls in zip(self.labels(), self._steps(), strict=True):
            if label not in reads and calls[0].kind != _ATTENTION:
                reads[label] = [self.tensors[index] for call in calls for index in call.weights if index != NONE]
        return reads

    def _steps(self) -> list[list[_Call]]:
        """Layers between two attentions together."""
        steps: list[list[_Call]] = []
        for call in self._calls:
            if steps and _ATTENTION not in (call.kind, steps[-1][0].kind):
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
                size = -(-value.size * value.columns // _LINE) * _LINE
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
    columns = _columns(_tensor_at(node))
    while node.op != "placeholder":
        source = node.args[0]
        if _name(node) not in _VIEWS or not isinstance(source, fx.Node) or _columns(_tensor_at(source)) != columns:
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


def _tensors_at(node: fx.Node) -> Sequence[Tensor]:
    value = value_of(node)
    return value if isinstance(value, tuple) else [_tensor_at(node)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage(node: fx.Node) -> int:
    return _memory(_tensor_at(node))


def _columns(tensor: Tensor) -> int:
    return math.prod(int(dim) for dim in tensor.shape[1:])


def _side_by_side(tensor: Tensor) -> bool:
    """Whether a row has no gaps."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= int(size)
    return True
