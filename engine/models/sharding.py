"""A rank's part of a model whose matrices are divided (Shoeybi et al., Megatron-LM, 2019). Torch-free.

Heads are divided with their keys and values, or with their states, MLPs and experts by their inner units, convolutions
by channels, tables by tokens: a rank makes its own heads and units whole, and of what they are brought together to a
part of a sum. Norms, routers and tables of positions every rank has. Of experts a rank may have some whole instead
(`engine.models.placement`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import msgspec

from engine.cpu_kernels.formats import PANEL
from engine.errors import ConfigError, UnsupportedModelError
from engine.models.facts import ConvFacts, DeltaFacts, HeadsSpec, MambaFacts, StateFacts
from engine.models.mixers import MambaSpec
from engine.models.placement import ExpertPlacement
from engine.models.spec import DecoderSpec, LayerSpec

_UNITS = (256, 128, 64, 32, 16)
"""inner units that stay together: whole blocks of quantised matrices, and with their gates whole panels"""
_MANY = 8
"""units of a rank, of which one more or less makes no great difference"""


class Shard(msgspec.Struct, frozen=True):
    """Which of how many parts."""

    rank: int
    size: int
    placement: ExpertPlacement | None = None
    """experts are whole, each in one rank; None: divided by their inner units"""
    only_experts: bool = False
    """and nothing else is divided: ranks compute other tokens"""


class Span(msgspec.Struct, frozen=True):
    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def times(self, factor: int, ahead: int = 0) -> Span:
        return Span(ahead + self.first * factor, self.count * factor)


class Heads(NamedTuple):
    """Of what keeps a state, as `HeadsSpec` names them: heads, and keys and queries that some have in common."""

    num_heads: int
    num_kv_heads: int


def heads_of(mixer: DeltaFacts | MambaFacts) -> Heads:
    if isinstance(mixer, DeltaFacts):
        return Heads(mixer.value_heads, mixer.key_heads)
    return Heads(mixer.heads, mixer.groups)


def divided(count: int, shard: Shard) -> Span:
    """Of `count` things, the first ranks have one more where they do not divide."""
    each, more = divmod(count, shard.size)
    return Span(shard.rank * each + min(shard.rank, more), each + (shard.rank < more))


def queries_of(mixer: HeadsSpec | Heads, shard: Shard) -> Span:
    """Query heads: whole groups that share keys, where there are as many; else some of one group."""
    if shard.size <= mixer.num_kv_heads:
        return divided(mixer.num_kv_heads, shard).times(mixer.num_heads // mixer.num_kv_heads)
    kv, sharers = keys_of(mixer, shard).first, sharers_of(mixer, shard)
    group = mixer.num_heads // mixer.num_kv_heads
    part = divided(group, Shard(sharers.index(shard.rank), len(sharers)))
    return Span(kv * group + part.first, part.count)


def keys_of(mixer: HeadsSpec | Heads, shard: Shard) -> Span:
    """Heads of keys and values; ranks have one in common where there are more ranks."""
    if shard.size <= mixer.num_kv_heads:
        return divided(mixer.num_kv_heads, shard)
    return Span(_group_of(mixer, shard.rank, shard.size), 1)


def sharers_of(mixer: HeadsSpec | Heads, shard: Shard) -> list[int]:
    """Ranks that have the same heads of keys and values."""
    if shard.size <= mixer.num_kv_heads:
        return [shard.rank]
    own = _group_of(mixer, shard.rank, shard.size)
    return [rank for rank in range(shard.size) if _group_of(mixer, rank, shard.size) == own]


def _group_of(mixer: HeadsSpec | Heads, rank: int, size: int) -> int:
    return rank * mixer.num_kv_heads // size


def units_of(inner: int, shard: Shard, whose: str = "an MLP") -> Span:
    """Of an MLP's inner units, or a convolution's channels. Raises ConfigError."""
    even = (unit for unit in _UNITS if inner % (unit * shard.size) == 0)
    uneven = (unit for unit in _UNITS if inner % unit == 0 and inner // unit >= _MANY * shard.size)
    unit = [*even, *uneven, _UNITS[-1]][0]
    if inner % unit or inner // unit < shard.size:
        raise ConfigError(
            f"tensor_parallel_size ({shard.size}): {whose} of {inner} units is divided in multiples of {unit}"
        )
    return divided(inner // unit, shard).times(unit)


def tokens_of(vocab_size: int, shard: Shard) -> Span:
    """Rows of the embedding and the unembedding."""
    part = divided(-(-vocab_size // PANEL), shard).times(PANEL)
    return Span(part.first, min(part.end, vocab_size) - part.first)


def sharded(spec: DecoderSpec, shard: Shard) -> DecoderSpec:
    """The model that a rank computes. Raises ConfigError for one that has less than a part for each rank,
    UnsupportedModelError for what is not divided."""
    if shard.placement is not None:
        counts = [0 if layer.experts is None else layer.experts.count for layer in spec.layers]
        shard.placement.check(counts, shard.size)
    if shard.only_experts:
        return msgspec.structs.replace(spec, layers=tuple(_with_own_experts(spec, shard)))
    if spec.vocab_size < PANEL * shard.size:
        raise ConfigError(f"tensor_parallel_size ({shard.size}): {spec.vocab_size} tokens are too few to divide")
    return msgspec.structs.replace(
        spec,
        layers=tuple(_layer(layer, shard, experts_of(spec, shard, index)) for index, layer in enumerate(spec.layers)),
        table_rows=tokens_of(spec.vocab_size, shard).count,
    )


def check_experts_divided(spec: DecoderSpec | None, replicas: int, placement: ExpertPlacement) -> None:
    """Over replicas. Raises what `sharded` does."""
    if spec is None:
        raise UnsupportedModelError("enable_expert_parallel: the experts of the library's modules are not divided")
    sharded(spec, Shard(0, replicas, placement, only_experts=True))


def check_divided(spec: DecoderSpec | None, ranks: int, placement: ExpertPlacement | None = None) -> None:
    """Raises what `sharded` does, for any of them; `spec`: None of a model that has none
    (`engine.models.fallback.division`)."""
    if ranks > 1 and spec is None and placement is not None:
        raise UnsupportedModelError(
            "enable_expert_parallel: a model that runs through the library has all experts in all ranks"
        )
    if ranks > 1 and spec is not None:
        sharded(spec, Shard(0, ranks, placement))


Mixer = TypeVar("Mixer", bound=HeadsSpec | StateFacts)


def divided_mixer(mixer: Mixer, shard: Shard) -> Mixer:
    """What a rank computes of it. Raises ConfigError, UnsupportedModelError."""
    if isinstance(mixer, ConvFacts):
        return msgspec.structs.replace(mixer, channels=channels_of(mixer, shard).count)
    heads = mixer if isinstance(mixer, HeadsSpec) else heads_of(mixer)
    if heads.num_heads < shard.size:
        raise ConfigError(f"tensor_parallel_size ({shard.size}) exceeds the {heads.num_heads} heads of a layer")
    own, shared = queries_of(heads, shard).count, keys_of(heads, shard).count
    if isinstance(mixer, HeadsSpec):
        return msgspec.structs.replace(mixer, num_heads=own, num_kv_heads=shared)
    if isinstance(mixer, DeltaFacts):
        return msgspec.structs.replace(mixer, value_heads=own, key_heads=shared)
    if isinstance(mixer, MambaSpec) and mixer.normed and 1 < mixer.groups < shard.size:
        raise UnsupportedModelError(
            f"tensor_parallel_size ({shard.size}): norms of {mixer.groups} groups of heads are not divided among more "
            f"ranks; use at most {mixer.groups}, or pipeline_parallel_size"
        )
    return msgspec.structs.replace(mixer, heads=own, groups=shared)


def channels_of(mixer: ConvFacts, shard: Shard) -> Span:
    return units_of(mixer.channels, shard, "a convolution")


def experts_of(spec: DecoderSpec, shard: Shard, layer: int) -> tuple[int, ...] | None:
    """Those of a layer that are whole in this rank; None where every rank has a part of each."""
    experts = spec.layers[layer].experts
    if shard.placement is None or experts is None:
        return None
    return shard.placement.own(layer, experts.count, shard.rank, shard.size)


def _with_own_experts(spec: DecoderSpec, shard: Shard) -> Iterator[LayerSpec]:
    for index, layer in enumerate(spec.layers):
        own = experts_of(spec, shard, index)
        experts = layer.experts if layer.experts is None else msgspec.structs.replace(layer.experts, own=own)
        yield msgspec.structs.replace(layer, experts=experts)


def _layer(layer: LayerSpec, shard: Shard, own: tuple[int, ...] | None) -> LayerSpec:
    mixer, mlp, experts = divided_mixer(layer.mixer, shard), layer.mlp, layer.experts
    side = None if layer.side is None else divided_mixer(layer.side, shard)
    if mlp is not None:
        mlp = msgspec.structs.replace(mlp, intermediate_size=units_of(mlp.intermediate_size, shard).count)
    if experts is not None and own is not None:
        experts = msgspec.structs.replace(experts, own=own)
    elif experts is not None:
        experts = msgspec.structs.replace(experts, inner_size=units_of(experts.inner_size, shard).count)
    return msgspec.structs.replace(layer, mixer=mixer, side=side, mlp=mlp, experts=experts)
