"""Sustained rates of several systems, as cells of a table and as a panel."""

from __future__ import annotations

from collections.abc import Sequence

from entrypoints.bench.paper.cost import Server
from entrypoints.bench.paper.figure import Json, Panel, Series, Study
from entrypoints.bench.paper.sustained import Curve, curve
from entrypoints.bench.paper.systems import OURS, Setup
from entrypoints.bench.paper.traces import Workload

Curves = dict[str, Curve]


def rate_curves(
    study: Study, what: str, systems: Sequence[str], server: Server, workload: Workload, seconds: float
) -> Curves:
    """A search for the sustained rate of each system. Ours finds a common prefix in its prefix cache."""
    found = {}
    for system in systems:
        study.progress(f"{what}: {server.name}, {workload.name}, {system}")
        setup = Setup(system, server, prefix_caching="prefix" in workload.name and system == OURS)
        found[system] = curve(setup, workload, seconds, study.scale, study.seed)
    return found


def rate_panel(study: Study, title: str, curves: Curves) -> Panel:
    series = [
        Series(system, [point.latency_s for point in found.points], [p.rate for p in found.points])
        for system, found in curves.items()
    ]
    return Panel(
        title=title,
        x_label="requests/s",
        y_label="s/token",
        kind="lines",
        series=series,
        y_max=study.scale.give_up_s,
        bound=study.scale.bound_s,
    )


def over(curves: Curves, other: str) -> float:
    """How many times the sustained rate of `other` ours is."""
    return curves[OURS].sustained / curves[other].sustained if curves[other].sustained else float("inf")


def as_json(curves: Curves) -> Json:
    return {
        system: {
            "sustained_per_s": found.sustained,
            "points": [[point.rate, point.latency_s] for point in found.points],
        }
        for system, found in curves.items()
    }


def rates_row(name: str, curves: Curves, systems: Sequence[str]) -> list[str]:
    return [name, *(f"{curves[system].sustained:.2f}" for system in systems)]
