"""What several front ends of the same cores show, as one text in Prometheus' form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

Key = tuple[str, tuple[tuple[str, str], ...]]


def added_up(texts: Sequence[bytes], alike: Collection[str], gone: Sequence[bytes] = ()) -> bytes:
    """`texts`: in Prometheus' text format, one at least. Samples are added up, other than those of families that all
    show `alike`, of which the most counts (counts of cores come to some a moment later), and times of creation, of
    which the first does. `gone`: of front ends that are no more, of which only what they have counted counts."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[Key, float]] = {}
    for place, text in enumerate([*texts, *gone]):
        for family in text_string_to_metric_families(text.decode()):
            if place >= len(texts) and (family.name in alike or family.type == "gauge"):
                continue
            families.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if key not in found:
                    found[key] = sample.value
                elif sample.name.endswith("_created"):
                    found[key] = min(found[key], sample.value)
                elif family.name in alike:
                    found[key] = max(found[key], sample.value)
                else:
                    found[key] += sample.value
    registry = CollectorRegistry()
    registry.register(_Shown([_with(families[name], found) for name, found in values.items()]))
    return generate_latest(registry)


def _with(family: Metric, values: dict[Key, float]) -> Metric:
    shown = Metric(family.name, family.documentation, family.type)
    shown.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return shown


class _Shown(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
