"""A traced graph as a flat program: token-wise pieces, and calls of the split ops between them.

Each piece is a graph of its own with anonymous placeholders (`size`, then `a0, a1, …`), so that layers which differ
only in their weights become the same text. Numbers of the host never cross a border: they are computed again where
needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from compilation.errors import CompileError
from compilation.trace import Traced, is_scalar, value_of


@dataclass(frozen=True, eq=False)
class Piece:
    """A token-wise part: `(size, *inputs) -> tuple(outputs)`. `inputs` and `outputs` are nodes of the traced graph."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a split op. Nodes among the arguments are nodes of the traced graph; `result` is None if nobody uses
    it.
    """

    op: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    reads: tuple[fx.Node, ...]
    result: fx.Node | None


@dataclass(frozen=True, eq=False)
class Fused:
    """Consecutive steps that one function computes, `[size, *inputs] -> outputs`; nodes are the traced graph's."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    function: Callable[[list[Any]], Sequence[Any]]
    timed: Callable[[list[Any]], tuple[Sequence[Any], Sequence[tuple[str, int]]]]
    """the same, and when each of its parts began: a label, and nanoseconds of the monotonic clock"""
    reads: Mapping[str, Sequence[Tensor]]
    """weights that a part of that label reads; no entry: it is a split op"""


Step = Piece | Call | Fused


def op_name(node: fx.Node) -> str | None:
    """The name "namespace::name" if the node calls a registered op."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return None


def split(traced: Traced, split_ops: frozenset[str]) -> tuple[Piece | Call, ...]:
    """Cut the graph at every call of an op in `split_ops` ("namespace::name").

    Raises CompileError for a split op that never occurs, returns several values, or writes to a tensor of which another
    view lives on across the border (pieces could not see the write).
    """
    segments: list[list[fx.Node]] = [[]]
    owner: dict[fx.Node, int] = {}
    calls: list[fx.Node] = []
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if op_name(node) in split_ops:
            calls.append(node)
            segments.append([])
            continue
        source = node.args[0] if node.target is operator.getitem else None
        # a tuple's items are taken where the tuple is, so that only tensors cross borders
        unpacks = isinstance(source, fx.Node) and source in owner and not isinstance(value_of(source), Tensor)
        index = owner[source] if unpacks and isinstance(source, fx.Node) else len(segments) - 1
        owner[node] = index
        segments[index].append(node)
    if missing := split_ops - {str(op_name(node)) for node in calls}:
        raise CompileError(f"the traced graph never calls {', '.join(sorted(missing))}: nothing to split at")
    steps: list[Piece | Call] = []
    for index, segment in enumerate(segments):
        piece = _piece(segment, owner, traced)
        if piece is not None:
            steps.append(piece)
        if index < len(calls):
            steps.append(_call(calls[index], traced))
    _check_writes(calls, owner, traced)
    return tuple(steps)


def _piece(segment: Sequence[fx.Node], owner: dict[fx.Node, int], traced: Traced) -> Piece | None:
    inside = {node for node in segment if not is_scalar(node)}
    if not inside:
        return None
    graph = fx.Graph()
    size = graph.placeholder("size")
    size.meta["example_value"] = value_of(traced.size)
    copies: dict[fx.Node, fx.Node] = {traced.size: size}
    inputs: list[fx.Node] = []
    for node in _outside(segment, inside):
        copy = graph.placeholder(f"a{len(inputs)}")
        copy.meta["example_value"] = _detached(value_of(node))
        copies[node] = copy
        inputs.append(node)

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copy_of)
            copies[node].meta = {"example_value": value_of(node)}
        return copies[node]

    for node in segment:
        if node in inside:
            copy_of(node)
    here = owner[segment[0]]
    outputs = tuple(n for n in segment if n in inside and any(owner.get(user) != here for user in n.users))
    for node in outputs:
        if not isinstance(value_of(node), Tensor):
            raise CompileError(f"{node.name} crosses a split but is not a tensor ({type(value_of(node)).__name__})")
    result = graph.output(tuple(copies[node] for node in outputs))
    result.meta["example_value"] = tuple(value_of(node) for node in outputs)
    return Piece(fx.GraphModule({}, graph), tuple(inputs), outputs)


def _outside(segment: Sequence[fx.Node], inside: set[fx.Node]) -> list[fx.Node]:
    """Tensors that the segment reads from elsewhere, in order of first use, seen through scalars that are copied in."""
    found: dict[fx.Node, None] = {}

    def visit(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in inside or source in found:
                continue
            if not is_scalar(source):
                found[source] = None
            elif source.op != "placeholder":
                visit(source)

    for node in segment:
        if node in inside:
            visit(node)
    return list(found)


def _detached(value: object) -> object:
    """The same fake tensor without gradient: a piece's code must not depend on `requires_grad`."""
    return value.detach() if isinstance(value, Tensor) else value


def _call(node: fx.Node, traced: Traced) -> Call:
    for source in node.all_input_nodes:
        if source is not traced.size and not isinstance(value_of(source), Tensor):
            raise CompileError(f"{op_name(node)} takes {source.name}, neither a tensor nor the number of tokens")
    if node.users and not isinstance(value_of(node), Tensor):
        raise CompileError(f"{op_name(node)} returns several values; a split op returns one tensor or nothing")
    result = node if node.users else None
    return Call(str(op_name(node)), node.args, dict(node.kwargs), tuple(node.all_input_nodes), result)


def _written(node: fx.Node) -> list[fx.Node]:
    """Arguments that the op's schema declares as written."""
    target = node.target
    overload = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
    if not isinstance(overload, torch._ops.OpOverload):
        return []
    written = []
    for index, argument in enumerate(overload._schema.arguments):
        value = node.kwargs.get(argument.name, node.args[index] if index < len(node.args) else None)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            written.append(value)
    return written


def storage_of(node: fx.Node) -> int | None:
    """Identity of the storage that the node's fake tensor lives in."""
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _check_writes(calls: Sequence[fx.Node], owner: dict[fx.Node, int], traced: Traced) -> None:
    """A written tensor may reach later pieces under one name only: compiled pieces need not keep two views in one
    buffer.
    """
    crossing: dict[int, set[fx.Node]] = {}
    for node in traced.graph.nodes:
        storage = storage_of(node)
        if storage is not None and any(owner.get(user) != owner.get(node) for user in node.users):
            crossing.setdefault(storage, set()).add(node)
    for call in calls:
        for written in _written(call):
            others = crossing.get(storage_of(written) or 0, set()) - {written}
            if others:
                names = ", ".join(sorted(node.name for node in others))
                raise CompileError(f"{op_name(call)} writes {written.name}, of which {names} are views used elsewhere")
