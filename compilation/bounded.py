"""A piece for 1 to `largest` tokens, where the trace says no more than "some number".

An unbacked size is right for tracing (one graph serves every n, 1 included) and wrong for generating code: Inductor
fuses nothing whose size it cannot estimate (torch 2.11: a normalisation becomes two kernels, and a decode of one token
is paid by the kernel), and it indexes with 64 bits what might be large. So a piece is handed over with a size that has
a value and a bound. What the generator takes from the value must hold for every n that will be run: it writes each such
decision down as a guard, and a piece with a guard that is not proven for the whole range is compiled without a bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from compilation.trace import SIZE_MARK


class Bounded:
    """A copy of a piece's module whose example values have one size, between 1 and `largest`."""

    def __init__(self, module: fx.GraphModule, largest: int) -> None:
        self._largest = largest
        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        # A prime beyond every size: nothing of the model equals or divides it, so that no guard says so.
        self._value = _prime_above(largest)
        source = ConstantSource(SIZE_MARK)
        create: Callable[..., Any] = self._env.create_symbol
        self._symbol = create(self._value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        self._size = self._env.create_symintnode(self._symbol, hint=self._value, source=source)
        self._known: dict[int, Tensor] = {}
        self.module = copy.copy(module)
        self.module.graph = copy.deepcopy(module.graph)
        for node, original in zip(self.module.graph.nodes, module.graph.nodes, strict=True):
            node.meta = {"example_value": self._value_of(original.meta.get("example_value"))}

    def holds(self) -> bool:
        """Whether what Inductor took for granted is true of every size in the range."""
        size = {self._symbol: ValueRanges(1, self._largest)}
        proven = [bound_sympy(guard.expr, size) for guard in self._env.guards]
        return all(fact.is_singleton() and bool(fact.lower) for fact in proven) and not self._env.replacements

    def _value_of(self, value: object) -> object:
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                shape, stride = [[self._number(dim) for dim in dims] for dims in (value.shape, value.stride())]
                with self._mode:
                    new = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
                self._known[id(value)] = new
            return self._known[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._value_of, value))
        return self._number(value) if isinstance(value, torch.SymInt) else value

    def _number(self, number: int | torch.SymInt) -> int | torch.SymInt:
        """The same expression of the size that has a value. A trace has one size only."""
        if isinstance(number, int):
            return number
        expression = number.node.expr
        expression = expression.xreplace(dict.fromkeys(expression.free_symbols, self._symbol))
        if expression == self._symbol:
            return self._size
        return self._env.create_symintnode(expression, hint=int(expression.subs(self._symbol, self._value)))


def _prime_above(number: int) -> int:
    candidate = number + 1
    while any(candidate % divisor == 0 for divisor in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate
