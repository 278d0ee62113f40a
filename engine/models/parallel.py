"""A decoder's part that a rank computes, joined with the others' (`engine.models.sharding` says how it is divided).

What heads and inner units are brought together to is a part of a sum, which ranks add up before the residual joins.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from engine.models.decoder import Decoder
from engine.models.decoder_layer import AnyLinear, DecoderLayer
from engine.models.device_packed import StoredEmbedding, StoredExperts, StoredLinear
from engine.models.experts import Experts
from engine.models.layers import Embedding, Linear, Norm, RMSNorm, WideRMSNorm
from engine.models.mamba import Mamba
from engine.models.mixers import MambaSpec, MixerSpec
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.models.packed_experts import GatedBeside, PackedExperts
from engine.models.sharding import Shard, sharers_of, tokens_of
from engine.models.spec import DecoderSpec
from engine.parallel.group import Group


class SummedLinear(nn.Module):
    """A linear layer over this rank's part of the inputs: see `engine.models.layers.Linear`."""

    def __init__(self, part: AnyLinear, group: Group, ahead: SummedNorm | None = None) -> None:
        """`ahead`: of its inputs."""
        super().__init__()
        self.part: nn.Module = part
        self.ahead = ahead
        self._name, self._all_reduce = group.name, group.all_reduce

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.part(x if self.ahead is None else self.ahead.weighted(x, self.ahead.weight), norm)
        return self._all_reduce(y, residual, y.dtype, self._name)


class SummedExperts(nn.Module):
    """Of every expert this rank's part of the inner units: see `engine.models.experts.Experts`."""

    def __init__(self, part: Experts | PackedExperts | StoredExperts, group: Group) -> None:
        super().__init__()
        self.part: nn.Module = part
        self._name, self._all_reduce = group.name, group.all_reduce

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self.part(x, ids, factors)
        return self._all_reduce(y, residual, y.dtype, self._name)


class SummedBeside(nn.Module):
    """See `engine.models.packed_experts.GatedBeside`."""

    def __init__(self, part: GatedBeside, group: Group) -> None:
        super().__init__()
        self.part = part
        self._name, self._all_reduce = group.name, group.all_reduce

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        y = self.part(x, None)
        return self._all_reduce(y, residual, y.dtype, self._name)


class SplitEmbedding(nn.Module):
    """Rows `first` and on are this rank's; of other tokens its part of the sum is zeros."""

    def __init__(
        self, part: Embedding | PackedEmbedding | StoredEmbedding, first: int, count: int, group: Group
    ) -> None:
        super().__init__()
        self.part = part
        self.first, self.count = first, count
        self._name, self._all_reduce = group.name, group.all_reduce

    @property
    def weight(self) -> torch.Tensor:
        weight = self.part.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        own = input_ids - self.first
        rows = self.part(own.clamp(0, self.count - 1))
        is_own = (own >= 0) & (own < self.count)
        return self._all_reduce(rows * is_own[:, None].to(rows.dtype), None, rows.dtype, self._name)


class SplitHead(nn.Module):
    """Logits of this rank's tokens, beside the others'."""

    def __init__(self, part: Linear | PackedLinear | StoredLinear, counts: list[int], group: Group) -> None:
        super().__init__()
        self.part = part
        self.counts = counts
        self._name, self._all_gather = group.name, group.all_gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_gather(self.part(x), self.counts, self._name)


class SummedNorm(nn.Module):
    """RMSNorm over the whole width of q, of k, or of what states gave, of which this rank has some heads."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        is_wide: bool,
        width: int,
        group: Group,
        share: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        """`is_wide`: as `WideRMSNorm`; `width`: of all ranks' heads, each counted once; `share`: this rank's of squares
        that others have, too; `scale`: of what comes out."""
        super().__init__()
        self.weight, self.eps, self._is_wide = weight, eps, is_wide
        self.width, self.share, self.scale = width, share, scale
        self._name, self._all_reduce = group.name, group.all_reduce

    def weighted(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = wide.pow(2).sum(-1, keepdim=True) * self.share
        total = self._all_reduce(squares, None, torch.float32, self._name)
        normed = wide * torch.rsqrt(total / self.width + self.eps)
        made = (normed * weight).to(x.dtype) if self._is_wide else weight * normed.to(x.dtype)
        return made if self.scale == 1.0 else made * self.scale


def join(model: Decoder, whole: DecoderSpec, group: Group) -> None:
    """Put into `model`, a filled part of `whole` (a model, or a stage of one), what brings ranks together."""
    shard = Shard(group.rank, group.size)
    for layer, spec in zip(model.layers, whole.layers, strict=True):
        assert isinstance(layer, DecoderLayer)
        ahead = _norm_of_states(layer, spec.mixer, group) if isinstance(spec.mixer, MambaSpec) else None
        replaced: dict[str, nn.Module] = {"o_proj": SummedLinear(layer.o_proj, group, ahead)}
        if spec.side is not None:
            assert layer.side_o_proj is not None
            of_side = _norm_of_states(layer, spec.side, group)
            replaced["side_o_proj"] = SummedLinear(layer.side_o_proj, group, of_side)
        if isinstance(spec.mixer, MixerSpec) and spec.mixer.qk_norm == "row":
            layer.rotation = None
            replaced |= _row_norms(layer, spec.mixer, shard, group)
        if layer.down_proj is not None:
            replaced["down_proj"] = SummedLinear(layer.down_proj, group)
        if layer.experts is not None:
            replaced["experts"] = SummedExperts(layer.experts, group)
        if layer.beside is not None:
            replaced["beside"] = SummedBeside(layer.beside, group)
        for name, module in replaced.items():
            setattr(layer, name, module)
    own = tokens_of(whole.vocab_size, shard)
    counts = [tokens_of(whole.vocab_size, Shard(rank, group.size)).count for rank in range(group.size)]
    if whole.begins:
        model.embed_tokens = cast(Embedding, SplitEmbedding(model.embed_tokens, own.first, own.count, group))
    if whole.ends:
        model.lm_head = cast(Linear, SplitHead(model.lm_head, counts, group))


def _row_norms(layer: DecoderLayer, mixer: MixerSpec, shard: Shard, group: Group) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    shares = {"q_norm": (mixer.q_size, 1), "k_norm": (mixer.kv_size, len(sharers_of(mixer, shard)))}
    for name, (width, sharers) in shares.items():
        norm = getattr(layer, name)
        if isinstance(norm, RMSNorm):
            is_wide = isinstance(norm, WideRMSNorm)
            found[name] = SummedNorm(norm.weight, norm.eps, is_wide, width, group, 1.0 / sharers)
    return found


def _norm_of_states(layer: DecoderLayer, mixer: MambaSpec, group: Group) -> SummedNorm | None:
    """Out of the mixer, where ranks have heads of one group; what it is given is then rounded once more."""
    if not mixer.normed or mixer.groups >= group.size:
        return None
    assert isinstance(layer.mixing, Mamba) and layer.mixing.norm is not None
    weight, layer.mixing.norm = layer.mixing.norm, None
    scale, layer.mixing.out_scale = layer.mixing.out_scale, 1.0
    return SummedNorm(weight, mixer.norm_eps, True, mixer.inner_size, group, scale=scale)
