"""Layouts as a picture: what callers see of each, simulated beside real, with deviations over seeds.

Needs matplotlib, which only the extra `bench` brings; it is imported here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.outcome import Outcome
from entrypoints.bench.profile_plot import matplotlib_module

_PANELS = (("tokens_per_s", "tokens/s", 1.0), ("ttft_p90", "TTFT p90, s", 1.0), ("tpot_p90", "TPOT p90, ms", 1000.0))
_COLOURS = {"simulated": "#4c78a8", "real": "#f58518"}


def draw(told: Sequence[tuple[str, Layout, Outcome]], limits: dict[str, float | None], path: Path) -> None:
    """Write the picture; the format follows the file's suffix. `limits`: by a figure's name, what it is to be below."""
    names = list(dict.fromkeys(f"{layout}\n{layout.devices}" for _, layout, _ in told))
    kinds = [kind for kind in _COLOURS if any(each == kind for each, _, _ in told)]
    figure = matplotlib_module("figure").Figure(figsize=(11, 3.4), dpi=150, layout="constrained")
    for axes, (figure_name, label, unit) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for index, kind in enumerate(kinds):
            of_kind = [(f"{layout}\n{layout.devices}", outcome) for each, layout, outcome in told if each == kind]
            places = [names.index(name) + (index - (len(kinds) - 1) / 2) * 0.35 for name, _ in of_kind]
            values = [unit * getattr(outcome, figure_name) for _, outcome in of_kind]
            spread = [unit * outcome.spread.get(figure_name, 0.0) for _, outcome in of_kind]
            axes.bar(places, values, 0.33, yerr=spread, capsize=2, color=_COLOURS[kind], label=kind)
        _frame(axes, names, label, limits.get(figure_name), unit)
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path)


def _frame(axes: Any, names: list[str], label: str, limit: float | None, unit: float) -> None:
    if limit is not None:
        axes.axhline(unit * limit, color="#e45756", linewidth=1)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_xlabel("layout, and its devices", fontsize=8)
    axes.set_title(label, fontsize=10, loc="left")
