"""A rank's part of a model whose matrices are divided (Shoeybi et al., Megatron-LM, 2019). Torch-free.

Heads are divided with their keys and values, MLPs and experts by their inner units, tables by tokens: a rank makes its
own heads and units whole, and of what they are brought together to a part of a sum. Norms, routers and tables of
positions every rank has. Of experts a rank may have some whole instead (`engine.models.placement`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from engine.cpu_kernels.formats import PANEL
from engine.errors import ConfigError, UnsupportedModelError
from engine.models.facts import HeadsSpec
from engine.models.families.rows import Rows
from engine.models.mixers import LatentSpec, MixerSpec, StateSpec
from engine.models.placement import ExpertPlacement
from engine.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec

_UNITS = (256, 128, 64, 32, 16)
"""inner units that stay together: whole blocks of quantised matrices, and with their gates whole panels"""
_MANY = 8
"""units of a rank, of which one more or less makes no great difference"""
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TABLES = frozenset({"embed_tokens.weight", "lm_head.weight", "lm_head.bias"})
_SUMMED_BIASES = frozenset({"o_proj.bias", "down_proj.bias", "experts.down_bias"})


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


class Taken(msgspec.Struct, frozen=True):
    """What a rank takes of a parameter, or of a tensor that holds rows of it."""

    rows: tuple[Span, ...] | None = None
    """None: all"""
    columns: Span | None = None
    experts: tuple[int, ...] | None = None
    """of a tensor that stacks them; None: all"""
    is_zero: bool = False
    """another rank's alone, because parts of a sum are added up: zeros here"""

    @property
    def is_all(self) -> bool:
        return self.rows is None and self.columns is None and self.experts is None and not self.is_zero


def divided(count: int, shard: Shard) -> Span:
    """Of `count` things, the first ranks have one more where they do not divide."""
    each, more = divmod(count, shard.size)
    return Span(shard.rank * each + min(shard.rank, more), each + (shard.rank < more))


def queries_of(mixer: HeadsSpec, shard: Shard) -> Span:
    """Query heads: whole groups that share keys, where there are as many; else some of one group."""
    if shard.size <= mixer.num_kv_heads:
        return divided(mixer.num_kv_heads, shard).times(mixer.num_heads // mixer.num_kv_heads)
    kv, sharers = keys_of(mixer, shard).first, sharers_of(mixer, shard)
    group = mixer.num_heads // mixer.num_kv_heads
    part = divided(group, Shard(sharers.index(shard.rank), len(sharers)))
    return Span(kv * group + part.first, part.count)


def keys_of(mixer: HeadsSpec, shard: Shard) -> Span:
    """Heads of keys and values; ranks have one in common where there are more ranks."""
    if shard.size <= mixer.num_kv_heads:
        return divided(mixer.num_kv_heads, shard)
    return Span(_group_of(mixer, shard.rank, shard.size), 1)


def sharers_of(mixer: HeadsSpec, shard: Shard) -> list[int]:
    """Ranks that have the same heads of keys and values."""
    if shard.size <= mixer.num_kv_heads:
        return [shard.rank]
    own = _group_of(mixer, shard.rank, shard.size)
    return [rank for rank in range(shard.size) if _group_of(mixer, rank, shard.size) == own]


def _group_of(mixer: HeadsSpec, rank: int, size: int) -> int:
    return rank * mixer.num_kv_heads // size


def units_of(inner: int, shard: Shard) -> Span:
    """Of an MLP's inner units. Raises ConfigError."""
    even = (unit for unit in _UNITS if inner % (unit * shard.size) == 0)
    uneven = (unit for unit in _UNITS if inner % unit == 0 and inner // unit >= _MANY * shard.size)
    unit = [*even, *uneven, _UNITS[-1]][0]
    if inner % unit or inner // unit < shard.size:
        raise ConfigError(
            f"tensor_parallel_size ({shard.size}): an MLP of {inner} units is divided in multiples of {unit}"
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
    mixer, mlp, experts = layer.mixer, layer.mlp, layer.experts
    if isinstance(mixer, StateSpec) or layer.side is not None:
        raise UnsupportedModelError("tensor_parallel_size: layers that keep states are not divided yet; use replicas")
    if isinstance(mixer, MixerSpec) and mixer.gated:
        raise UnsupportedModelError("tensor_parallel_size: attention with a gate is not divided yet; use replicas")
    if mixer.num_heads < shard.size:
        raise ConfigError(f"tensor_parallel_size ({shard.size}) exceeds the {mixer.num_heads} heads of a layer")
    mixer = msgspec.structs.replace(
        mixer, num_heads=queries_of(mixer, shard).count, num_kv_heads=keys_of(mixer, shard).count
    )
    if mlp is not None:
        mlp = msgspec.structs.replace(mlp, intermediate_size=units_of(mlp.intermediate_size, shard).count)
    if experts is not None and own is not None:
        experts = msgspec.structs.replace(experts, own=own)
    elif experts is not None:
        experts = msgspec.structs.replace(experts, inner_size=units_of(experts.inner_size, shard).count)
    return msgspec.structs.replace(layer, mixer=mixer, mlp=mlp, experts=experts)


def taken(spec: DecoderSpec, shard: Shard, parameter: str) -> Taken:
    """Of a parameter of the whole model, `spec`."""
    if parameter in _TABLES and not shard.only_experts:
        return Taken((tokens_of(spec.vocab_size, shard),))
    found = _LAYER.fullmatch(parameter)
    if found is None:
        return Taken()
    own = experts_of(spec, shard, int(found[1]))
    if own is not None and found[2].startswith("experts."):
        return Taken(experts=own)
    if shard.only_experts:
        return Taken()
    return _of_layer(spec.layers[int(found[1])], shard, found[2])


def _of_layer(layer: LayerSpec, shard: Shard, name: str) -> Taken:
    mixer, mlp, experts = layer.mixer, layer.mlp, layer.experts
    module = name.partition(".")[0]
    if name in _SUMMED_BIASES:
        return Taken(is_zero=shard.rank > 0)
    if isinstance(mixer, StateSpec):
        return Taken()
    if isinstance(mixer, LatentSpec):
        if module in ("qkv_proj", "latent", "o_proj"):
            return _of_latents(mixer, shard, name)
    elif module == "qkv_proj":
        return Taken(_heads(mixer, shard))
    elif mixer.qk_norm == "row" and module in ("q_norm", "k_norm"):
        heads = queries_of(mixer, shard) if module == "q_norm" else keys_of(mixer, shard)
        return Taken((heads.times(mixer.head_dim),))
    if module == "sinks":
        return Taken((queries_of(mixer, shard),))
    if module == "o_proj":
        return Taken(columns=queries_of(mixer, shard).times(mixer.head_dim))
    if module in ("gate_up_proj", "down_proj") and mlp is not None:
        units = units_of(mlp.intermediate_size, shard)
        return Taken(_first_rows(mlp, units)) if module == "gate_up_proj" else Taken(columns=units)
    if module == "experts" and experts is not None:
        units = units_of(experts.inner_size, shard)
        return Taken(columns=units) if name == "experts.down" else Taken(_first_rows(experts, units))
    return Taken()


def _of_latents(mixer: LatentSpec, shard: Shard, name: str) -> Taken:
    """Heads are divided; the rows that are kept, and what queries are made of, every rank makes whole."""
    heads, facts = queries_of(mixer, shard), mixer.latent
    if name == "o_proj.weight":
        return Taken(columns=heads.times(facts.v_head_dim))
    if name == "qkv_proj.weight" and mixer.q_lora_rank is None:
        return Taken((heads.times(facts.qk_head_dim), Span(mixer.q_size, facts.row_size)))
    if name == "latent.q_b_proj.weight":
        return Taken((heads.times(facts.qk_head_dim),))
    return Taken((heads.times(facts.made_size),)) if name == "latent.kv_b" else Taken()


def _heads(mixer: MixerSpec, shard: Shard) -> tuple[Span, ...]:
    spans = [queries_of(mixer, shard).times(mixer.head_dim)]
    if mixer.shares is None:
        keys = keys_of(mixer, shard)
        starts = [mixer.q_size, mixer.q_size + mixer.kv_size]
        spans += [keys.times(mixer.head_dim, start) for start in starts[: 1 if mixer.values == "normed_keys" else 2]]
    return tuple(spans)


def _first_rows(mlp: MlpSpec | ExpertsSpec, units: Span) -> tuple[Span, ...]:
    if not mlp.gated:
        return (units,)
    inner = mlp.intermediate_size if isinstance(mlp, MlpSpec) else mlp.inner_size
    return (units, units.times(1, inner))


def shard_rows(
    spec: DecoderSpec, shard: Shard, rows: dict[str, Rows]
) -> tuple[dict[str, Rows], dict[str, tuple[Taken, int]]]:
    """Where the tensors of a whole model's checkpoint go in a rank's; and what is taken of those of which that is not
    all, once they are arranged, with the axis of their rows. Another rank's expert goes nowhere, and nothing of it is
    taken."""
    placed, parts = {}, {}
    for name, row in rows.items():
        of_parameter = taken(spec, shard, row.parameter)
        if of_parameter.is_all:
            placed[name] = row
            continue
        if of_parameter.experts is not None and isinstance(row.expert, int):
            if row.expert in of_parameter.experts:
                own = of_parameter.experts.index(row.expert)
                placed[name] = Rows(row.parameter, row.start, row.count, expert=own)
            else:
                parts[name] = Taken(experts=()), row.axis
            continue
        start, spans = row.start, None
        count = row.count
        if of_parameter.rows is not None:
            end = row.start + row.count
            start = sum(max(min(span.end, row.start) - span.first, 0) for span in of_parameter.rows)
            cut = [(max(span.first, row.start), min(span.end, end)) for span in of_parameter.rows]
            spans = tuple(Span(first - row.start, last - first) for first, last in cut if last > first)
            count = sum(span.count for span in spans)
        placed[name] = Rows(row.parameter, start, count, expert=row.expert)
        parts[name] = msgspec.structs.replace(of_parameter, rows=spans), row.axis
    return placed, parts
