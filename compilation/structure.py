"""A piece's structure as text: equal text means equal code, whatever the layer, the process or the machine's paths.

Nodes are numbered, functions are named through their qualified names (`str()` of a function holds an address), symbols
are renamed in order of appearance, registered ops carry their schema. Weights appear only as dtype, shape, stride and
device (with its index: generated code holds it).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx
from torch.fx.node import _get_qualified_name

from compilation.errors import CompileError
from compilation.trace import value_of

_SYMBOL = re.compile(r"\b[us]\d+\b")


class _Symbols:
    """Renames symbols (u3, s77) by order of appearance: their numbers depend on what was traced before."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def rename(self, expression: object) -> str:
        return _SYMBOL.sub(lambda match: self._names.setdefault(match.group(), f"n{len(self._names)}"), str(expression))


def describe(graph: fx.Graph) -> str:
    """The graph's structure, one node a line. Raises CompileError for an argument whose text would not be stable."""
    symbols = _Symbols()
    numbers: dict[fx.Node, int] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            text = _placeholder(value_of(node), symbols)
        else:
            arguments = f"{_argument(node.args, numbers, symbols)} {_argument(dict(node.kwargs), numbers, symbols)}"
            text = f"{node.op} {_target(node)} {arguments}"
        lines.append(f"%{len(numbers)} {text}")
        numbers[node] = len(numbers)
    return "\n".join(lines)


def structural_hash(graph: fx.Graph) -> str:
    """SHA-256 of `describe`, in hexadecimal."""
    return hashlib.sha256(describe(graph).encode()).hexdigest()


def _placeholder(value: object, symbols: _Symbols) -> str:
    if not isinstance(value, Tensor):
        return f"size {symbols.rename(value)}"
    shape = ", ".join(symbols.rename(dim) for dim in value.shape)
    stride = ", ".join(symbols.rename(dim) for dim in value.stride())
    return f"tensor {value.dtype} [{shape}] [{stride}] {value.device}"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads: Iterable[str] = target._overload_names
        return " | ".join(str(getattr(target, name)._schema) for name in sorted(overloads))
    return target if isinstance(target, str) else _get_qualified_name(target)


def _argument(value: object, numbers: Mapping[fx.Node, int], symbols: _Symbols) -> str:
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(item, numbers, symbols) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, Mapping):
        pairs = (f"{key}={_argument(item, numbers, symbols)}" for key, item in sorted(value.items()))
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), numbers, symbols)}"
    if isinstance(value, torch.device):
        return str(value)
    if value is None or value is Ellipsis or isinstance(value, (bool, int, float, str)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return symbols.rename(value)
    raise CompileError(f"an argument of type {type(value).__name__} has no stable text; keep it out of forward")
