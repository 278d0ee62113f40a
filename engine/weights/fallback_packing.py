"""Packed layers in the place of a library's dense ones, on CPUs: what multiplies by a matrix, found by its kind, by its
neighbours' names and by what it computes.

Projections of one input (q, k, v; gate, up) become one matrix. Their modules stay where the model's code expects them,
and each is a part of the joined product; in a traced graph the products are the same call, and made once
(`engine.cpu_kernels.folding`). An MLP or a norm is replaced only if what takes its place computes the same on random
rows: names alone say too little.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from engine.models.device_packed import StoredExperts
from engine.models.experts import Experts
from engine.models.layers import Embedding, Linear, RMSNorm, WideRMSNorm, activated
from engine.models.packed import FUSED_GATES, PackedEmbedding, PackedLinear, RowNorm
from engine.models.packed_experts import PackedExperts
from engine.models.spec import Activation, ClampedSwiGLU, ExpertsSpec, RouterSpec
from engine.weights.source import Part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.models.decoder_layer import AnyLinear
    from engine.weights.device_packing import DevicePacker
    from engine.weights.packing import Packer

_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_GATES = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATIONS = ("act_fn", "activation_fn")
_EPSILONS = ("variance_epsilon", "eps")
_ROWS = 5
_ANY_ROUTER = RouterSpec(top_k=1)
_SAME, _CLOSE, _CLOSE_QUANTISED = 1e-5, 2e-2, 0.3
"""largest difference over the largest value: of float32, of bfloat16, and where weights of four bits are in it"""


class Rows(nn.Module):
    """A layer over rows, for code that has a batch of one sequence."""

    def __init__(self, inner: nn.Module, out_dims: int = 2) -> None:
        super().__init__()
        self.inner = inner
        self._dims = out_dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, tokens, …], [tokens, …], or with more dimensions before the last."""
        if x.dim() == self._dims:
            return cast(torch.Tensor, self.inner(x))
        if x.dim() == self._dims + 1 and x.size(0) == 1:
            return cast(torch.Tensor, self.inner(x[0]))[None]
        rows: torch.Tensor = self.inner(x.reshape(-1, x.size(-1)))
        return rows.view(*x.shape[:-1], rows.size(-1))


class Joined(nn.Module):
    """One product for several projections of the same input. Without a compiler the last one is remembered, because
    they are asked for one after the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = Rows(inner)
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return cast(torch.Tensor, self.inner(x))
        if self._last is None or self._last[0] is not x:
            self._last = x, self.inner(x)
        found: torch.Tensor = self._last[1]
        return found


class Share(nn.Module):
    """`size` columns of a joined product, from `first` on."""

    def __init__(self, joined: Joined, first: int, size: int, is_last: bool) -> None:
        super().__init__()
        self.joined = joined
        self._first, self._size, self._is_last = first, size, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.joined(x).narrow(-1, self._first, self._size)
        if self._is_last and not torch.compiler.is_compiling():
            self.joined._last = None
        return part


class GatedMlp(nn.Module):
    def __init__(self, gate_up: AnyLinear, down: AnyLinear) -> None:
        super().__init__()
        self.gate_up, self.down = Rows(gate_up), Rows(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(self.gate_up(x)))


def pack_library_model(whole: PreTrainedModel, packer: Packer) -> None:
    """In place, matrix by matrix: what was dense is dropped before the next is packed."""
    _pack_tables(whole, packer)
    _pack_below(whole.base_model, packer, set())


def _pack_below(parent: nn.Module, packer: Packer, seen: set[nn.Module]) -> None:
    """`seen`: a module may have several parents."""
    if parent in seen or isinstance(parent, Rows | Share | GatedMlp | NormOfRows | LibraryExperts):
        return
    seen.add(parent)
    for names in _JOINED:
        _join(parent, names, packer)
    for name, child in list(parent.named_children()):
        replaced = _experts(child, packer) or _gated_mlp(child, packer) or _norm(child, packer)
        if replaced is None and _is_plain(child) and not _reads_weight(parent, name):
            replaced = Rows(packer.pack_linear(_dense([cast(nn.Linear, child)]), [], None))
        if replaced is not None:
            setattr(parent, name, replaced)
        else:
            _pack_below(child, packer, seen)


def _reads_weight(parent: nn.Module, name: str) -> bool:
    """Whether the parent's code asks a layer for its matrix."""
    try:
        return f"{name}.weight" in inspect.getsource(type(parent).forward)
    except (OSError, TypeError):
        return True


def _is_plain(module: object) -> bool:
    """A matrix and nothing else: what derives from it may compute something else."""
    return type(module) is nn.Linear


def _dense(linears: Sequence[nn.Linear], activation: Activation | None = None, gated: bool = False) -> Linear:
    """One layer of ours with the rows of several, one below the other."""
    first, outputs = linears[0], sum(linear.out_features for linear in linears)
    dtype = first.weight.dtype
    layer = Linear(first.in_features, outputs, False, dtype, torch.device("meta"), activation, gated)
    layer.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if first.bias is not None:
        layer.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return layer


def _first(module: nn.Module, names: Sequence[str]) -> object:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _siblings(parent: nn.Module, names: Sequence[str]) -> list[nn.Linear] | None:
    """Plain layers of these names that could be one."""
    found = [getattr(parent, name, None) for name in names]
    if not all(_is_plain(each) for each in found):
        return None
    linears = cast(list[nn.Linear], found)
    alike = {(each.in_features, each.bias is None) for each in linears}
    return linears if len(alike) == 1 else None


def _join(parent: nn.Module, names: Sequence[str], packer: Packer) -> None:
    linears = _siblings(parent, names)
    if linears is None:
        return
    joined, first = Joined(packer.pack_linear(_dense(linears), [], None)), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, Share(joined, first, linear.out_features, name == names[-1]))
        first += linear.out_features


def _gated_mlp(module: nn.Module, packer: Packer) -> GatedMlp | None:
    """Where `module` is down(activation(gate(x)) * up(x)) with an activation that the kernels have."""
    down, act = getattr(module, "down_proj", None), _first(module, _ACTIVATIONS)
    for names in _GATES:
        gates = _siblings(module, names)
        activation = _activation_of(act)
        if gates is None or not _is_plain(down) or activation is None:
            continue
        assert isinstance(down, nn.Linear)
        dense = _dense(gates, activation, gated=True)
        x = _random(dense.weight.size(1))[None]
        if _difference(lambda x, first=dense, last=down: last(first(x)), module, x) <= _CLOSE:  # type: ignore[misc]
            return GatedMlp(packer.pack_linear(dense, [], None), packer.pack_linear(_dense([down]), [], None))
    return None


def _activation_of(act: object) -> Activation | None:
    if not callable(act):
        return None
    x = torch.linspace(-6, 6, 97)
    return next((name for name in FUSED_GATES if torch.allclose(act(x), activated(x, name), atol=1e-6)), None)


class LibraryExperts(nn.Module):
    """In the place of a library's experts: called with what its router chose."""

    def __init__(self, experts: PackedExperts | StoredExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """hidden [tokens, hidden_size]; chosen, factors [tokens, choices]."""
        return cast(torch.Tensor, self.experts(hidden, chosen.to(torch.int32), factors.float()))


def pack_library_experts(whole: PreTrainedModel, packer: DevicePacker) -> None:
    """In place and on the packer's device, before the rest of the model is there."""
    for parent in list(whole.modules()):
        for name, child in parent.named_children():
            if (experts := _experts(child, packer)) is not None:
                setattr(parent, name, experts)


def _experts(module: Any, packer: Packer | DevicePacker) -> LibraryExperts | None:
    """Where `module` is one of the library's stacks of gated MLPs with a gate that the kernels have."""
    if (
        not getattr(module, "has_gate", False)
        or getattr(module, "has_post_expert_norm", False)
        or module.down_proj.dim() != 3
    ):
        return None
    gate_up, down = (_stacked(module, name, module.is_transposed) for name in ("gate_up_proj", "down_proj"))
    count, hidden, inner = down.shape
    gate = _gate_of(module, inner)
    if gate is None:
        return None
    spec = ExpertsSpec(count=count, inner_size=inner, router=_ANY_ROUTER, activation=gate, bias=module.has_bias)
    dense = Experts(spec, hidden, down.dtype, torch.device("meta"))
    dense.gate_up, dense.down = (nn.Parameter(each, requires_grad=False) for each in (gate_up, down))
    if module.has_bias:
        biases = (_stacked(module, f"{name}_bias") for name in ("gate_up_proj", "down_proj"))
        dense.gate_up_bias, dense.down_bias = (nn.Parameter(each, requires_grad=False) for each in biases)
    packed = packer.pack_experts(dense, [], [], None)
    if not isinstance(packed, PackedExperts | StoredExperts):
        return None
    experts = LibraryExperts(packed)
    x = _random(hidden).to(module.down_proj.dtype)
    chosen = torch.arange(2 * _ROWS).view(_ROWS, 2) % count
    arguments = (x, chosen, torch.full((_ROWS, 2), 0.5, dtype=x.dtype))
    with torch.no_grad():
        found, expected = experts(*(each.to(packer.device) for each in arguments)).cpu(), module(*arguments)
        return experts if _distance(found, expected) <= _CLOSE_QUANTISED else None


def _gate_of(module: Any, inner: int) -> Activation | ClampedSwiGLU | None:
    """The kernels' gate that computes what the module's does."""
    x = 3 * _random(2 * inner)
    gate, up = x.chunk(2, dim=-1) if module.is_concatenated else (x[:, 0::2], x[:, 1::2])
    with torch.no_grad():
        expected = module._apply_gate(x)
    for name in FUSED_GATES:
        if _distance(activated(gate, name) * up, expected) < _SAME:
            return name
    if isinstance(limit := getattr(module, "limit", None), float):
        clamped = ClampedSwiGLU(limit, float(getattr(module, "alpha", 1.702)))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if _distance(gate * torch.sigmoid(clamped.alpha * gate) * (up + 1), expected) < _SAME:
            return clamped
    return None


def _stacked(module: Any, name: str, is_transposed: bool = False) -> torch.Tensor:
    """Of all experts, [experts, outputs, inputs] or [experts, outputs]; gates before ups."""
    found: torch.Tensor = getattr(module, name).detach()
    if is_transposed:
        found = found.transpose(1, 2)
    if name.startswith("gate_up") and not module.is_concatenated:
        found = torch.cat((found[:, 0::2], found[:, 1::2]), dim=1)
    return found


def _norm(module: nn.Module, packer: Packer) -> nn.Module | None:
    """Where `module` is an RMSNorm of either rounding, over whole rows or heads."""
    weight, eps = getattr(module, "weight", None), _first(module, _EPSILONS)
    names = {name for name, _ in module.named_parameters()}
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or names != {"weight"} or not isinstance(eps, float):
        return None
    kinds = ((RMSNorm, 0.0), (WideRMSNorm, 0.0), (WideRMSNorm, 1.0))
    norms = [kind(weight.numel(), eps, weight.dtype, weight.device) for kind, _ in kinds]
    for norm, (_, of_weight) in zip(norms, kinds, strict=True):
        norm.weight.data.copy_(weight.float() + of_weight)
    x = _random(weight.numel())[None]
    differences = [_difference(norm.forward, module, x) for norm in norms]
    if min(differences) > _CLOSE:
        return None
    norm = norms[differences.index(min(differences))]
    norm.rows = RowNorm(packer.ops)
    return NormOfRows(norm)


class NormOfRows(nn.Module):
    """Over the last dimension of whatever the model's code has."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3 and x.size(0) == 1:
            return cast(torch.Tensor, self.norm(x[0]))[None]
        size = x.size(-1)
        return cast(torch.Tensor, self.norm(x.reshape(-1, size))).view(x.shape)


def _random(size: int) -> torch.Tensor:
    """float32 [rows, size]."""
    return torch.randn(_ROWS, size, generator=torch.Generator().manual_seed(0))


def _difference(ours: Callable[[torch.Tensor], torch.Tensor], theirs: nn.Module, x: torch.Tensor) -> float:
    """The largest on random rows in the model's dtype, over the largest value; infinite for a module of another kind,
    which does not take such rows."""
    x = x.to(next(theirs.parameters()).dtype)
    try:
        with torch.no_grad():
            found, expected = ours(x), theirs(x)
    except Exception:
        return math.inf
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    return _distance(found, expected)


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _pack_tables(whole: PreTrainedModel, packer: Packer) -> None:
    """Embedding and unembedding, where they are a table and a matrix and nothing else."""
    table, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    if (
        type(table) is not nn.Embedding
        or not isinstance(head, nn.Linear)
        or not _is_plain(head)
        or head.bias is not None
    ):
        return
    embedding = Embedding(*table.weight.shape, table.weight.dtype, torch.device("meta"))
    embedding.weight = table.weight
    tables = SimpleNamespace(embed_tokens=embedding, lm_head=_dense([head]))
    is_tied = head.weight is table.weight
    if is_tied:
        tables.lm_head.weight = table.weight
    part = Part("", table.num_embeddings)
    packer.pack_tables(tables, part, None if is_tied else part, None)
    names = {id(module): name for name, module in whole.named_modules()}
    if isinstance(tables.embed_tokens, PackedEmbedding):
        whole.set_submodule(names[id(table)], Rows(tables.embed_tokens, 1))
    if isinstance(tables.lm_head, PackedLinear):
        whole.set_submodule(names[id(head)], Rows(tables.lm_head))
