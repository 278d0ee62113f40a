"""A rank's part of a library's model, where the library says how its matrices are divided (`base_model_tp_plan`).

Heads and inner units, as natively (`engine.models.sharding`). The plan names matrices; what stands between them is the
model's own code, so a module is divided only if it has nothing else that knows its heads or units. Whatever is not
divided every rank computes whole: embeddings, norms, routers, the unembedding.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from engine.errors import UnsupportedModelError
from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.fallback.facts import facts_of, probed, read_config
from engine.models.fallback.probe import SeenLayer, probe
from engine.models.sharding import Shard, Span, keys_of, queries_of, units_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.parallel.group import Group

_ROWS = 5
_SAME = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""largest difference over the largest value, of what a part of an MLP makes and of the same units of the whole"""
_INDEX = re.compile(r"\.\d+(?=\.|$)")
_WIDE, _DEEP = "colwise", "rowwise"
"""the library's words for a matrix whose outputs are divided, and for one whose inputs are"""


class Parted(NamedTuple):
    """What is computed in parts."""

    parent: str
    name: str
    """of a matrix in it, whose result is a part of a sum"""


def divide(whole: PreTrainedModel, layers: Sequence[SeenLayer], shard: Shard) -> list[Parted]:
    """In place; `layers`: what `probe` saw of it. Raises UnsupportedModelError naming what is not divided, ConfigError
    where there are fewer heads or units than ranks."""
    plan: Mapping[str, str] = getattr(whole.config, "base_model_tp_plan", None) or {}
    names = {id(module): name for name, module in whole.named_modules()}
    parents: dict[str, dict[str, str]] = defaultdict(dict)
    for name, module in whole.base_model.named_modules():
        style = plan.get(_INDEX.sub(".*", name))
        if style is not None and isinstance(module, nn.Linear):
            parent, _, child = names[id(module)].rpartition(".")
            parents[parent][child] = style
    heads = {layer.name: layer.heads for layer in layers}
    parted = [_divide_attention(whole.get_submodule(at), at, parents[at], heads[at], shard) for at in heads]
    for at, styles in parents.items():
        if at not in heads and (name := _divide_mlp(whole.get_submodule(at), at, styles, shard)) is not None:
            parted.append(Parted(at, name))
    return parted


def divided_facts(path: str, shard: Shard) -> ModelFacts:
    """Of a rank's part of the model there; nothing is computed. Raises what `divide` does."""
    config = read_config(path)
    whole, layers = probed(config)
    divide(whole, layers, shard)
    try:
        parts = probe(whole)
    except UnsupportedModelError as error:
        raise _refused(type(whole).__name__, f"with a part of its heads {error}") from error
    for layer, part in zip(layers, parts, strict=True):
        if (part.heads.num_heads, part.heads.num_kv_heads) != _heads_of(layer.heads, shard):
            raise _refused(layer.name, "its code makes other heads of a part of its matrices")
    return facts_of(config, whole, parts)


def check_library_divided(path: str, ranks: int) -> None:
    for rank in {0, ranks - 1} if ranks > 1 else ():
        divided_facts(path, Shard(rank, ranks))


def join_library(whole: PreTrainedModel, parted: Sequence[Parted], group: Group) -> None:
    """Put in what adds up the parts, once the layers are packed."""
    for at, name in parted:
        parent = whole.get_submodule(at)
        if hasattr(parent, name):
            setattr(parent, name, SummedResult(getattr(parent, name), group))
        else:  # packed as one, whose result is that of its last matrix
            whole.set_submodule(at, SummedResult(parent, group))


class SummedResult(nn.Module):
    """A layer over this rank's part of the inputs, [..., size] → [..., size]."""

    def __init__(self, part: nn.Module, group: Group) -> None:
        super().__init__()
        self.part = part
        self._name, self._all_reduce = group.name, group.all_reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.part(x)
        rows = y.reshape(-1, y.size(-1)).contiguous()
        return self._all_reduce(rows, None, y.dtype, self._name).view(y.shape)


def _heads_of(heads: HeadsSpec, shard: Shard) -> tuple[int, int]:
    return queries_of(heads, shard).count, keys_of(heads, shard).count


def _divide_attention(module: nn.Module, at: str, styles: Mapping[str, str], heads: HeadsSpec, shard: Shard) -> Parted:
    if set(styles.values()) != {_WIDE, _DEEP} or list(styles.values()).count(_DEEP) != 1:
        raise _refused(at, "the library does not say how its heads are divided")
    if heads.num_heads < shard.size:
        raise _refused(at, f"it has {heads.num_heads} heads")
    if any(parameter.shape != (heads.head_dim,) for parameter in _others(module, styles)):
        raise _refused(at, "what it has beside its matrices is not divided")
    queries, keys = (span.times(heads.head_dim) for span in (queries_of(heads, shard), keys_of(heads, shard)))
    last = ""
    for name, style in styles.items():
        linear = cast(nn.Linear, module.get_submodule(name))
        sizes = {heads.num_heads * heads.head_dim: queries}
        if style == _WIDE:
            sizes = {heads.num_kv_heads * heads.head_dim: keys, **sizes}
        size = linear.out_features if style == _WIDE else linear.in_features
        if size not in sizes:
            raise _refused(at, f"{name} is not a matrix of its heads alone")
        if style == _WIDE:
            _cut_outputs(linear, sizes[size])
        else:
            _cut_inputs(linear, sizes[size], shard)
            last = name
    return Parted(at, last)


def _divide_mlp(module: nn.Module, at: str, styles: Mapping[str, str], shard: Shard) -> str | None:
    """The name of the matrix whose result is a part of a sum; None: it stays whole."""
    linears = {name: cast(nn.Linear, module.get_submodule(name)) for name in styles}
    wide = [linears[name] for name, style in styles.items() if style == _WIDE]
    deep = [name for name, style in styles.items() if style == _DEEP]
    if len(deep) != 1 or not wide or len(wide) + 1 != len(styles) or list(_others(module, styles)):
        return None
    inner = linears[deep[0]].in_features
    if any(linear.out_features != inner for linear in wide):
        return None
    units, last = units_of(inner, shard), linears[deep[0]]
    expected = _met(module, last, wide[0].in_features)
    for linear in wide:
        _cut_outputs(linear, units)
    _cut_inputs(last, units, shard)
    if expected is not None:
        found, own = _met(module, last, wide[0].in_features), expected.narrow(-1, units.first, units.count)
        if found is None or (found - own).abs().max() > _SAME[last.weight.dtype] * expected.abs().max():
            raise _refused(at, "what its units do depends on others")
    return deep[0]


def _met(module: nn.Module, last: nn.Linear, inputs: int) -> torch.Tensor | None:
    """What comes to the last matrix of random rows, float32 [rows, units]; None on the meta device."""
    if last.weight.is_meta:
        return None
    seen = list[torch.Tensor]()
    hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0].float().reshape(_ROWS, -1)))
    x = torch.randn(1, _ROWS, inputs, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module(x.to(last.weight))
    hook.remove()
    return seen[0]


def _others(module: nn.Module, linears: Mapping[str, str]) -> list[nn.Parameter]:
    """Parameters of a module that are not of those layers."""
    return [parameter for name, parameter in module.named_parameters() if name.rpartition(".")[0] not in linears]


def _cut_outputs(linear: nn.Linear, own: Span) -> None:
    linear.weight = _own(linear.weight.narrow(0, own.first, own.count))
    if linear.bias is not None:
        linear.bias = _own(linear.bias.narrow(0, own.first, own.count))
    linear.out_features = own.count


def _cut_inputs(linear: nn.Linear, own: Span, shard: Shard) -> None:
    linear.weight = _own(linear.weight.narrow(1, own.first, own.count))
    if linear.bias is not None and shard.rank > 0:  # once in the sum
        linear.bias = _own(torch.zeros_like(linear.bias))
    linear.in_features = own.count


def _own(part: torch.Tensor) -> nn.Parameter:
    """In memory of its own: the whole is let go."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def _refused(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"tensor_parallel_size: {name} cannot be divided: {why}")
