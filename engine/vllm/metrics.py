"""A registry's metrics as vLLM's `LLM.get_metrics` shows them. Names are ours (docs/metrics.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

_BY_POSITION = "position"
Labels = dict[str, str]


@dataclass
class Metric:
    """One for each set of labels."""

    name: str
    labels: Labels


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """`buckets`: upper bound, or "+Inf", to the observations that are not above it."""

    count: int
    sum: float
    buckets: dict[str, int]


def metrics_of(registry: CollectorRegistry) -> list[Metric]:
    return [metric for family in registry.collect() for metric in _metrics(family)]


def _metrics(family: Family) -> Iterator[Metric]:
    if family.type == "gauge":
        yield from (Gauge(family.name, dict(sample.labels), sample.value) for sample in family.samples)
    elif family.type == "counter":
        samples = [sample for sample in family.samples if sample.name == f"{family.name}_total"]
        if family.name.endswith("_per_pos"):
            for labels, mine in _by_labels(samples, _BY_POSITION):
                values = [0] * (1 + max(int(sample.labels[_BY_POSITION]) for sample in mine))
                for sample in mine:
                    values[int(sample.labels[_BY_POSITION])] = int(sample.value)
                yield Vector(family.name, labels, values)
        else:
            yield from (Counter(family.name, dict(sample.labels), int(sample.value)) for sample in samples)
    elif family.type == "histogram":
        for labels, mine in _by_labels(family.samples, "le"):
            buckets = {sample.labels["le"]: int(sample.value) for sample in mine if "le" in sample.labels}
            of_all = {sample.name: sample.value for sample in mine if "le" not in sample.labels}
            count, total = int(of_all[f"{family.name}_count"]), of_all[f"{family.name}_sum"]
            yield Histogram(family.name, labels, count, total, buckets)


def _by_labels(samples: Iterable[Sample], but: str) -> Iterator[tuple[Labels, list[Sample]]]:
    """Samples that have the same labels, all `but` one."""
    groups: dict[frozenset[tuple[str, str]], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[frozenset((name, value) for name, value in sample.labels.items() if name != but)].append(sample)
    yield from ((dict(sorted(labels)), mine) for labels, mine in groups.items())
