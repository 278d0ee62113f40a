"""What a traced model computes around its native operators is given to them, where they can take it along.

A library's module calls a product for each of q, k and v, norms rows before it, adds residuals behind it and turns
heads in many small steps. Here equal products become one; a norm before and a residual behind go into the product; and
what lies between a product and attention becomes `rotate_heads` if that computes the same: it is run on random rows,
since a rotation is written in as many ways as there are models. Then nothing but native calls is left between two
attentions, and a tape can hold them (`engine.cpu_kernels.tape`). A graph that has nothing of this stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from attention_backends.op import ATTENTION_OP
from compilation.split import op_name
from compilation.trace import Traced, value_of
from engine.cpu_kernels.tape_program import native_name

_X, _NORM, _EPS, _RESIDUAL, _GATE, _WIDE = 0, 5, 6, 7, 8, 9
"""arguments of `packed_linear`"""
_NORM_RESIDUAL = 8
"""of `rotate_heads`"""
_ADDS = (operator.add, torch.add, "add")
_WRITERS = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior")
_ROWS, _CLOSE = 3, 3e-2


def fold(traced: Traced) -> None:
    """Changes the graph in place; what it computes stays, but for roundings within a rotation."""
    unread = {node for node in traced.graph.nodes if not node.users}
    """they are there for what they write, and stay"""
    folding = _Folding(traced)
    folding.drop_dropout()
    folding.join_equal_products()
    folding.turn_heads()
    folding.add_residuals()
    folding.take_norms()
    folding.drop_views()
    for node in reversed(list(traced.graph.nodes)):
        if node.op.startswith("call") and not node.users and node not in unread and not _writes(node):
            traced.graph.erase_node(node)
    traced.graph.lint()


class _Folding:
    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._graph = traced.graph
        self._ropes: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        writers = [node for node in self._graph.nodes if _writes(node) and op_name(node) != ATTENTION_OP]
        self._written = {_storage(each) for node in writers for each in _nodes(node.args) if _is_tensor(each)}
        """storages that change: what reads them stays where it is"""

    def _products(self) -> list[fx.Node]:
        """That read and make what is never changed."""
        products = [node for node in self._graph.nodes if native_name(node) == "packed_linear"]
        return [each for each in products if not {_storage(each), *map(_storage, _nodes(each.args))} & self._written]

    def drop_dropout(self) -> None:
        """Which does nothing where nothing is trained."""
        for node in [node for node in self._graph.nodes if node.target is F.dropout]:
            training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
            if training is False and node is not self._traced.output:
                self._replace(node, _nodes(node.args)[0])

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        storage = _storage(node)
        node.replace_all_uses_with(other)
        self._graph.erase_node(node)
        for each in self._graph.nodes:  # what was a part of this memory is one of its arguments' now
            if each.op != "placeholder" and any(_memory(tensor) == storage for tensor in _tensors(each)):
                each.meta["example_value"] = self._value(each)

    def join_equal_products(self) -> None:
        known: dict[tuple[object, ...], fx.Node] = {}
        for node in self._products():
            key = (node.target, *(_root(each) if isinstance(each, fx.Node) else each for each in node.args))
            if known.setdefault(key, node) is not node:
                self._replace(node, known[key])

    def take_norms(self) -> None:
        """Of rows that only products read."""
        products = set(self._products())
        for norm in [node for node in self._graph.nodes if _is_row_norm(node)]:
            readers = _readers(norm)
            if not all(reader in products and reader.args[_NORM] is None for reader in readers):
                continue
            x, _, weight, _, eps, *_ = norm.args
            for reader in readers:
                if all(_root(each) is not norm for each in _nodes(reader.args[1:])):
                    _set(reader, {_X: x, _NORM: weight, _EPS: eps})

    def add_residuals(self) -> None:
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        adds = [node for node in self._graph.nodes if node.target in _ADDS and len(node.args) == 2]
        products = set(self._products())
        for add in adds:
            if add is self._traced.output:
                continue
            for view, other in (add.args, add.args[::-1]):
                if not (isinstance(view, fx.Node) and isinstance(other, fx.Node)):
                    continue
                maker = _root(view)
                place = self._residual_of(maker, products)
                if place is None or _readers(maker) != [add] or not _alike(view, other):
                    continue
                if order[other] < order[maker] and (rows := self._rows(other)) is not None:
                    _set(maker, {place: rows})
                    self._replace(add, view)
                    break

    def _residual_of(self, maker: fx.Node, products: set[fx.Node]) -> int | None:
        """Which argument a residual would be; None: it takes none, or has one."""
        if maker in products:
            return None if any(maker.args[i] for i in (_RESIDUAL, _GATE, _WIDE)) else _RESIDUAL
        return _NORM_RESIDUAL if _is_row_norm(maker) else None

    def _rows(self, node: fx.Node) -> fx.Node | None:
        """[1, tokens, n] as [tokens, n]."""
        for each in (_root(node), node):
            if _tensor(each).dim() == 2:
                return each
        if _tensor(node).dim() != 3 or _tensor(node).size(0) != 1:
            return None
        with self._graph.inserting_after(node):
            return self._new(operator.getitem, (node, 0))

    def turn_heads(self) -> None:
        for call in [node for node in self._graph.nodes if op_name(node) == ATTENTION_OP]:
            turn = _Turn.found(self._traced, call)
            if turn is not None:
                self._turn(call, turn)

    def _turn(self, call: fx.Node, turn: _Turn) -> None:
        old = call.args[:3]
        rope = self._rope(turn)
        if rope is None:
            return
        heads = [_tensor(node).size(1) for node in _nodes(old)]
        with self._graph.inserting_after(turn.product):
            turned = self._new(turn.op, (turn.product, rope, *turn.norms, turn.eps, heads[0], heads[1], turn.dim, None))
        with self._graph.inserting_after(turned):
            rows = self._new("unflatten", (turned, -1, (-1, turn.dim)))
        first, last = 0, rows
        for node, count in zip(_nodes(old), heads, strict=True):
            with self._graph.inserting_after(last):
                last = self._new("narrow", (rows, 1, first, count))
            node.replace_all_uses_with(last)
            first += count

    def _rope(self, turn: _Turn) -> fx.Node | None:
        """[tokens, turned]: cosines, then sines. None: they are made too late."""
        pair = turn.cos, turn.sin
        if pair not in self._ropes:
            order = {node: index for index, node in enumerate(self._graph.nodes)}
            latest = max(pair, key=lambda node: order[node])
            if order[latest] > order[turn.product]:
                return None
            halves = []
            for node in pair:
                for target, arguments in (("flatten", (0, -2)), ("narrow", (-1, 0, turn.turned // 2))):
                    with self._graph.inserting_after(latest):
                        latest = node = self._new(target, (node, *arguments))
                halves.append(node)
            with self._graph.inserting_after(latest):
                self._ropes[pair] = self._new(torch.cat, (tuple(halves), -1))
        return self._ropes[pair]

    def drop_views(self) -> None:
        """Detours: a batch of one sequence that is put around rows and taken off again."""
        for node in list(self._graph.nodes):
            root = _root(node) if _is_tensor(node) else node
            if root is node or node is self._traced.output:
                continue
            rows, whole = _tensor(node), _tensor(root)
            if _alike(node, root):
                node.replace_all_uses_with(root)
            elif (rows.dim(), whole.dim()) == (2, 3) and _equal(rows.size(0), whole.size(0)):
                with self._graph.inserting_after(node):
                    node.replace_all_uses_with(self._new("flatten", (root, 1)))

    def _new(self, target: Callable[..., Any] | str, arguments: tuple[Any, ...]) -> fx.Node:
        node = self._graph.create_node("call_method" if isinstance(target, str) else "call_function", target, arguments)
        node.meta["example_value"] = self._value(node)
        return node

    def _value(self, node: fx.Node) -> Any:
        """What the node makes of its arguments' fake tensors."""
        arguments: Any = fx.map_arg(node.args, cast(Any, value_of))
        fake: Any = next(tensor for source in node.all_input_nodes for tensor in _tensors(source))
        with fake.fake_mode:
            return _computed(node, arguments, node.kwargs)


class _Turn:
    """Steps between a product and attention that `rotate_heads` does."""

    def __init__(self, product: fx.Node, cos: fx.Node, sin: fx.Node, dim: int) -> None:
        self.product, self.cos, self.sin, self.dim = product, cos, sin, dim
        self.turned = int(_tensor(cos).size(-1))
        """elements of a head, the first ones"""
        self.norms: tuple[fx.Node | None, fx.Node | None] = (None, None)
        self.eps = 0.0

    @property
    def op(self) -> Any:
        namespace = self.product.target.namespace  # type: ignore[union-attr]
        return getattr(torch.ops, namespace).rotate_heads.default

    @classmethod
    def found(cls, traced: Traced, call: fx.Node) -> _Turn | None:
        q, k, v = _nodes(call.args[:3])
        product = _owner(v)
        if native_name(product) != "packed_linear" or _tensor(product).dim() != 2:
            return None
        between = _between(product, (q, k))
        outside = {each for node in between for each in node.all_input_nodes if each not in between}
        tables = [each for each in outside - {product} if each not in traced.weights and _is_tensor(each)]
        sizes = [_tensor(node).size(1) * _tensor(node).size(2) for node in (q, k, v)]
        dim = int(_tensor(q).size(2))
        if any(_writes(node) for node in between):
            return None
        widths = {_tensor(table).size(-1) for table in tables}
        if len(tables) != 2 or len(widths) != 1 or not 0 < max(widths) <= dim:
            return None
        if sum(sizes) != _tensor(product).size(1):
            return None
        norms = [[node for node in _between(product, (end,)) if _is_row_norm(node)] for end in (q, k)]
        for cos, sin in (tables, tables[::-1]):
            turn = cls(product, _root(cos), _root(sin), dim)
            if [len(each) for each in norms] == [1, 1]:
                turn.norms = norms[0][0].args[2], norms[1][0].args[2]  # type: ignore[assignment]
                turn.eps = norms[0][0].args[4]  # type: ignore[assignment]
            if turn._computes(traced, between, (cos, sin), (q, k), sum(sizes[:2])):
                return turn
        return None

    def _computes(
        self, traced: Traced, between: Sequence[fx.Node], tables: Sequence[fx.Node], ends: Sequence[fx.Node], size: int
    ) -> bool:
        """Whether the operator makes of random rows what the steps make of them."""
        generator = torch.Generator().manual_seed(0)
        columns, dtype = int(_tensor(self.product).size(1)), _tensor(self.product).dtype
        rows = torch.randn(_ROWS, columns, generator=generator).to(dtype)
        angles = torch.rand(_ROWS, self.turned // 2, generator=generator) * 6.28
        halves = angles.cos().to(dtype), angles.sin().to(dtype)
        known: dict[fx.Node, Any] = {self.product: rows, traced.size: _ROWS, **traced.weights}
        for node, half in zip(tables, halves, strict=True):
            shape = [dim if isinstance(dim, int) else _ROWS for dim in _tensor(node).shape]
            known[node] = torch.cat((half, half), dim=-1).reshape(shape)
        try:
            for node in between:
                known[node] = _computed(node, fx.map_arg(node.args, known.__getitem__), node.kwargs)
            weights = [None if norm is None else traced.weights[norm] for norm in self.norms]
            heads = [int(_tensor(end).size(1)) for end in ends]
            found = self.op(rows, torch.cat(halves, dim=-1), *weights, self.eps, *heads, self.dim, None)[:, :size]
            expected = torch.cat([known[end].reshape(_ROWS, -1) for end in ends], dim=-1)
        except (KeyError, RuntimeError):
            return False
        return bool((found.float() - expected.float()).abs().max() <= _CLOSE * expected.float().abs().max())


def _between(start: fx.Node, ends: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes through which `ends` depend on `start`, in order, `ends` among them."""
    depends: dict[fx.Node, bool] = {start: True}

    def visit(node: fx.Node) -> bool:
        if node not in depends:
            depends[node] = False
            depends[node] = any([visit(source) for source in node.all_input_nodes])  # noqa: C419 - visits all
        return depends[node]

    for end in ends:
        visit(end)
    return [node for node in start.graph.nodes if depends.get(node) and node is not start]


def _writes(node: fx.Node) -> bool:
    """Into one of its arguments."""
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITERS or node.is_impure()


def _computed(node: fx.Node, arguments: Sequence[Any], kwargs: Any = None) -> Any:
    target = getattr(arguments[0], node.target) if node.op == "call_method" else node.target  # type: ignore[arg-type]
    return target(*(arguments[1:] if node.op == "call_method" else arguments), **(kwargs or {}))  # type: ignore[operator]


def _set(node: fx.Node, changes: dict[int, Any]) -> None:
    node.args = tuple(changes.get(index, argument) for index, argument in enumerate(node.args))


def _nodes(arguments: Sequence[Any]) -> list[fx.Node]:
    return [each for each in arguments if isinstance(each, fx.Node)]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), Tensor)


def _tensor(node: fx.Node) -> Tensor:
    value = value_of(node)
    assert isinstance(value, Tensor), node
    return value


def _tensors(node: fx.Node) -> list[Tensor]:
    """Its value, or those in it."""
    value = value_of(node)
    return [each for each in (value if isinstance(value, tuple | list) else (value,)) if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage(node: fx.Node) -> int:
    return _memory(_tensor(node))


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = _tensor(one), _tensor(other)
    return a.dtype == b.dtype and len(a.shape) == len(b.shape) and all(map(_equal, a.shape, b.shape))


def _equal(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(one == other))


def _is_same(node: fx.Node, source: fx.Node) -> bool:
    """Whether both are all of one storage, row after row."""
    if not (_is_tensor(node) and _is_tensor(source)) or _storage(node) != _storage(source):
        return False
    a, b = _tensor(node), _tensor(source)
    return a.dtype == b.dtype and _equal(a.numel(), b.numel()) and _is_contiguous(a) and _is_contiguous(b)


def _is_contiguous(tensor: Tensor) -> bool:
    """For every number of tokens."""
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (isinstance(size, int) and size == 1) and not _equal(stride, expected):
            return False
        expected = expected * size
    return True


def _root(node: fx.Node) -> fx.Node:
    """What a node only shapes anew."""
    while node.args and isinstance(source := node.args[0], fx.Node) and _is_same(node, source):
        node = source
    return node


def _owner(node: fx.Node) -> fx.Node:
    """Of whose memory a node is a part."""
    while node.args and isinstance(source := node.args[0], fx.Node) and _is_tensor(source):
        if _storage(node) != _storage(source):
            break
        node = source
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, through what only shapes it anew."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        if user.args and user.args[0] is node and _is_same(user, node):
            found.update(dict.fromkeys(_readers(user)))
        else:
            found[user] = None
    return list(found)


def _is_row_norm(node: fx.Node) -> bool:
    """`rotate_heads` that norms one head, which is the whole row, and does nothing else."""
    if native_name(node) != "rotate_heads":
        return False
    _, rope, weight, again, _, q_heads, k_heads, _, residual = node.args
    return rope is None and residual is None and weight is again and (q_heads, k_heads) == (1, 0)
