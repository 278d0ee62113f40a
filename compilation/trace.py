"""A module's forward as one FX graph for every number of tokens, with its weights lifted out.

Dynamo traces the forward through a backend that keeps the graph and then calls nothing. Weights are recognised by
identity among the arguments that Dynamo hands to the backend's callable, so no name of Dynamo's is ever parsed.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilation.device_guard import keep_device_guard_alive
from compilation.errors import CompileError

SIZE_MARK = "tokens"


@dataclass(frozen=True)
class Traced:
    """One graph, valid for every size of dimension 0 of the inputs.

    Placeholders are of three kinds: `size` (the number of tokens, an int), `inputs` (in the order of forward's
    arguments; an argument that forward does not use is None), `weights` (parameters, buffers and tensor constants,
    detached).
    """

    graph: fx.Graph
    size: fx.Node
    inputs: tuple[fx.Node | None, ...]
    weights: dict[fx.Node, Tensor]
    output: fx.Node


class _Captured(BaseException):
    """Unwinds from Dynamo's first call; no user code may catch it, hence BaseException."""


def value_of(node: fx.Node) -> object:
    """What Dynamo saw at this node: a fake tensor, a symbolic or plain number, or a container of those."""
    return node.meta.get("example_value")


def is_scalar(node: fx.Node) -> bool:
    """Whether the node is a number of the host: free to compute again wherever it is needed."""
    return isinstance(value_of(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def trace(module: nn.Module, example_inputs: Sequence[Tensor]) -> Traced:
    """Trace `module(*example_inputs)`. All inputs share the size of dimension 0; other dimensions are fixed.

    Raises CompileError if forward breaks the graph, specialises on the number of tokens, or returns more than one
    tensor.
    """
    if not example_inputs or any(x.dim() == 0 or x.size(0) != example_inputs[0].size(0) for x in example_inputs):
        raise CompileError("compilation needs at least one input, and inputs that share the size of dimension 0")
    keep_device_guard_alive()
    graph_module, arguments, inputs = _capture(module, example_inputs)
    graph = graph_module.graph
    _drop_assertions(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    position = {id(tensor): index for index, tensor in enumerate(inputs)}
    input_nodes: list[fx.Node | None] = [None] * len(inputs)
    weights: dict[fx.Node, Tensor] = {}
    sizes: list[fx.Node] = []
    for node, argument in zip(placeholders, arguments, strict=True):
        if not isinstance(argument, Tensor):
            sizes.append(node)
        elif id(argument) in position:
            input_nodes[position[id(argument)]] = node
        else:
            weights[node] = argument.detach()
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(graph_module, str(node.target), None)
        if not isinstance(constant, Tensor):
            raise CompileError(f"forward of {type(module).__name__} holds control flow ({node.target}); use mode none")
        weights[node] = constant.detach()
    size = _one_size(graph, sizes, type(module).__name__)
    return Traced(graph, size, tuple(input_nodes), weights, _one_output(graph, type(module).__name__))


def _capture(
    module: nn.Module, example_inputs: Sequence[Tensor]
) -> tuple[fx.GraphModule, Sequence[object], list[Tensor]]:
    graphs, calls = list[fx.GraphModule](), list[Sequence[object]]()

    def record(*arguments: object) -> object:
        calls.append(arguments)
        raise _Captured

    def backend(graph_module: fx.GraphModule, _examples: Sequence[object]) -> Callable[..., object]:
        graphs.append(graph_module)
        return record

    # Automatic dynamic shapes would turn a buffer's size symbolic once a model of another size had been traced before.
    dynamo = torch._dynamo.config.patch(automatic_dynamic_shapes=False)
    with torch.inference_mode(False), torch.no_grad(), dynamo:
        inputs = [x.detach().clone() for x in example_inputs]  # ours: the marks stay on the tensors
        checks = not _mark_sizes(inputs)
        try:
            torch.compile(_own_code(module, checks), backend=backend, fullgraph=True)(*inputs)
        except _Captured:
            pass
        except torch._dynamo.exc.TorchDynamoException as error:
            name = type(module).__name__
            raise CompileError(f"forward of {name} is not one graph; use mode none. {error}") from error
    if not calls:
        raise CompileError("torch.compile is disabled in this process; use mode none")
    return graphs.pop(), calls.pop(), inputs  # Dynamo keeps `record` for ever, which must not keep the weights


def _mark_sizes(inputs: Sequence[Tensor]) -> bool:
    """Mark dimension 0 unbacked. Returns whether this torch can say that all of them are one size."""
    mark: Callable[..., None] = torch._dynamo.decorators.mark_unbacked
    shared = "shape_id" in inspect.signature(mark).parameters
    for tensor in inputs:
        if shared:
            mark(tensor, 0, shape_id=SIZE_MARK)
        else:
            mark(tensor, 0)
    return shared


def _own_code(module: nn.Module, check_sizes: bool) -> Callable[..., object]:
    """A function with a code object of its own, so that Dynamo's cache entry, which holds the weights, dies with it."""

    check: Callable[[bool], None] = torch._check

    def forward(*inputs: Tensor) -> object:
        if check_sizes:
            for tensor in inputs[1:]:
                check(tensor.size(0) == inputs[0].size(0))
        return module(*inputs)

    code = forward.__code__.replace()
    return types.FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def _drop_assertions(graph: fx.Graph) -> None:
    """Dynamo asserts u0 >= 0 and u1 == u0 in the graph; the stitched program checks its inputs itself, once."""
    ops = torch.ops.aten
    ranges = (ops.sym_constrain_range.default, ops.sym_constrain_range_for_size.default)
    assertions: set[object] = {ops._assert_scalar.default, *ranges, torch._check, torch._check_is_size}
    for node in reversed(list(graph.nodes)):
        unused_scalar = node.op == "call_function" and not node.users and is_scalar(node)
        if node.op == "call_function" and (node.target in assertions or unused_scalar):
            graph.erase_node(node)


def _one_size(graph: fx.Graph, sizes: Sequence[fx.Node], name: str) -> fx.Node:
    """The placeholder of the number of tokens; every node that computes the same symbol again is replaced by it."""
    symbols = {str(value_of(node)) for node in sizes}
    if len(symbols) != 1:
        found = ", ".join(sorted(symbols)) or "none"
        raise CompileError(f"forward of {name} must keep one free size, dimension 0 of its inputs; found: {found}")
    size = sizes[0]
    symbol = str(value_of(size))
    sources = {torch.ops.aten.sym_size.int, operator.getitem}
    for node in list(graph.nodes):
        again = node in sizes[1:] or (node.op == "call_method" and node.target == "size") or node.target in sources
        if node is not size and again and isinstance(value_of(node), torch.SymInt) and str(value_of(node)) == symbol:
            node.replace_all_uses_with(size)
            graph.erase_node(node)
    return size


def _one_output(graph: fx.Graph, name: str) -> fx.Node:
    (outputs,) = graph.output_node().args
    nodes: list[Any] = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    if len(nodes) != 1 or not isinstance(nodes[0], fx.Node) or not isinstance(value_of(nodes[0]), Tensor):
        raise CompileError(f"forward of {name} must return exactly one tensor")
    return nodes[0]
