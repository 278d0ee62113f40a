"""What a rank takes of a model's parameters, and of a checkpoint's tensors. Torch-free."""

from __future__ import annotations

import re

import msgspec

from engine.models.families.rows import Rows
from engine.models.mixers import ConvSpec, DeltaSpec, LatentSpec, MambaSpec, MixerSpec, StateSpec
from engine.models.sharding import (
    Shard,
    Span,
    channels_of,
    experts_of,
    heads_of,
    keys_of,
    queries_of,
    tokens_of,
    units_of,
)
from engine.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_TABLES = frozenset({"embed_tokens.weight", "lm_head.weight", "lm_head.bias"})
_SUMMED_BIASES = frozenset({"o_proj.bias", "down_proj.bias", "experts.down_bias"})


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
    if module in ("gate_up_proj", "down_proj") and mlp is not None:
        units = units_of(mlp.intermediate_size, shard)
        return Taken(_first_rows(mlp, units)) if module == "gate_up_proj" else Taken(columns=units)
    if module == "experts" and experts is not None:
        units = units_of(experts.inner_size, shard)
        return Taken(columns=units) if name == "experts.down" else Taken(_first_rows(experts, units))
    if layer.side is not None:
        return _of_both(layer.mixer, layer.side, shard, name)
    if isinstance(mixer, MixerSpec):
        return _of_heads(mixer, shard, name)
    return _of_latents(mixer, shard, name) if isinstance(mixer, LatentSpec) else _of_states(mixer, shard, name)


def _of_both(mixer: MixerSpec | LatentSpec | StateSpec, side: MambaSpec, shard: Shard, name: str) -> Taken:
    """Of attention, and of what keeps a state beside it: the first matrix makes what both are given."""
    assert isinstance(mixer, MixerSpec)
    if name == "qkv_proj.weight":
        behind = _of_states(side, shard, name).rows or ()
        return Taken((*_heads(mixer, shard), *(span.times(1, mixer.first_size) for span in behind)))
    if name == "side_o_proj.weight":
        return _of_states(side, shard, "o_proj.weight")
    return _of_states(side, shard, name) if name.startswith("mixing.") else _of_heads(mixer, shard, name)


def _of_heads(mixer: MixerSpec, shard: Shard, name: str) -> Taken:
    module, queries = name.partition(".")[0], queries_of(mixer, shard)
    if module == "qkv_proj":
        return Taken(_heads(mixer, shard))
    if mixer.qk_norm == "row" and module in ("q_norm", "k_norm"):
        heads = queries if module == "q_norm" else keys_of(mixer, shard)
        return Taken((heads.times(mixer.head_dim),))
    if module == "sinks":
        return Taken((queries,))
    return Taken(columns=queries.times(mixer.head_dim)) if module == "o_proj" else Taken()


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


def _of_states(mixer: StateSpec, shard: Shard, name: str) -> Taken:
    """A rank has whole heads, and of what these have in common whatever they need; or channels."""
    if isinstance(mixer, ConvSpec):
        values = channels_of(mixer, shard)
        channels: tuple[Span, ...] = (values,)
        first, rates = tuple(values.times(1, part * mixer.channels) for part in range(3)), channels
    else:
        heads, groups = queries_of(heads_of(mixer), shard), keys_of(heads_of(mixer), shard)
        if isinstance(mixer, DeltaSpec):
            values, keys, size = heads.times(mixer.value_dim), groups.times(mixer.key_dim), mixer.key_size
            channels = (keys, keys.times(1, size), values.times(1, 2 * size))
            first = (*channels, *_gates(mixer, heads, values))
        else:
            values, keys, size = heads.times(mixer.head_dim), groups.times(mixer.state_size), mixer.inner_size
            channels = (values, keys.times(1, size), keys.times(1, size + mixer.groups * mixer.state_size))
            first = (values, *(each.times(1, size) for each in channels), heads.times(1, size + mixer.channels))
        rates = (heads,)
        if isinstance(mixer, DeltaSpec) and name in ("mixing.decay_bias", "low_rank.decay_b_proj.weight"):
            return Taken((heads.times(mixer.decay_size // mixer.value_heads),))
        if name == "low_rank.gate_b_proj.weight":
            return Taken((values,))
    if name == "o_proj.weight":
        return Taken(columns=values)
    if name == "mixing.norm":
        return Taken((values,)) if isinstance(mixer, MambaSpec) else Taken()
    rows = {"qkv_proj.weight": first, "qkv_proj.bias": first, "mixing.weight": channels, "mixing.bias": channels}
    return Taken(rows.get(name, rates if name.startswith("mixing.") else None))


def _gates(mixer: DeltaSpec, heads: Span, values: Span) -> tuple[Span, Span, Span]:
    """Rows of the first matrix behind queries, keys and values; of matrices that others make gates of, whole ones."""
    at = mixer.channels
    if mixer.rank is None:
        return (
            values.times(1, at),
            heads.times(1, at + mixer.value_size),
            heads.times(1, mixer.first_size - mixer.value_heads),
        )
    end = at + mixer.rank + mixer.value_heads
    return Span(at, mixer.rank), heads.times(1, at + mixer.rank), Span(end, mixer.rank)


def _heads(mixer: MixerSpec, shard: Shard) -> tuple[Span, ...]:
    queries = queries_of(mixer, shard)
    gates = mixer.q_size * mixer.gated
    spans = [queries.times(mixer.head_dim, start) for start in ((0, gates) if gates else (0,))]
    if mixer.shares is None:
        keys = keys_of(mixer, shard)
        starts = [gates + mixer.q_size, gates + mixer.q_size + mixer.kv_size]
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
