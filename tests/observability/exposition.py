"""A page of /metrics, read by Prometheus' own parser."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families


class Page:
    def __init__(self, text: str) -> None:
        self.labels: defaultdict[str, set[str]] = defaultdict(set)
        """of each series' name: labels that every one of its samples has"""
        self.values: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                known = self.labels.get(sample.name)
                self.labels[sample.name] = set(sample.labels) if known is None else known & set(sample.labels)
                self.values[sample.name].append((sample.labels, sample.value))

    def total(self, name: str) -> float:
        """Over all its samples."""
        assert name in self.values, name
        return sum(value for _, value in self.values[name])
