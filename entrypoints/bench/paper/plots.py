"""Panels as PNG files. Needs matplotlib, which only the extra `bench` brings; it is imported here alone."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from entrypoints.bench.paper.figure import Figure, Panel

_COLOURS = {
    "ours": "#1f4e79",
    "Orca (Oracle)": "#54a24b",
    "Orca (Pow2)": "#eeb868",
    "Orca (Max)": "#e45756",
    "FasterTransformer": "#9d755d",
}
_OTHERS = ("#1f4e79", "#f2a45c", "#c44e52", "#c7c7c7", "#72b7b2", "#b279a2")
_LINES = ("#1f4e79", "#f2a45c", "#c44e52", "#72b7b2", "#b279a2", "#54a24b")
_BARS = ("#1f4e79", "#b8c4d6", "#f2a45c")
_MARKERS = "osv^Dx"
_COLUMNS = 3
_LOG_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def require_matplotlib() -> None:
    """Raises ValueError with what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "plots need matplotlib, which is not installed: pip install 'pageloom[bench]', or give --no-plots"
        )


def draw(figure: Figure, path: Path) -> None:
    """Write all panels of the figure side by side."""
    panels = figure.panels
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width = 7.6 if len(panels) == 1 else 3.9 * columns
    canvas = _matplotlib("figure").Figure(figsize=(width, 0.6 + 3.0 * rows), dpi=100, layout="constrained")
    grid = canvas.subplots(rows, columns, squeeze=False)
    colours = _colours(panels)
    for index, axes in enumerate(grid.flat):
        if index < len(panels):
            _draw_panel(axes, panels[index], colours)
        else:
            axes.set_axis_off()
    _legends(canvas, grid, panels)
    canvas.suptitle(figure.title, fontsize=11, x=0.01, ha="left")
    canvas.savefig(path)
    _fewer_colours(path)


def _fewer_colours(path: Path) -> None:
    """A plot has few, and the file is a third as large. Pillow comes with matplotlib."""
    pillow = importlib.import_module("PIL.Image")
    with pillow.open(path) as picture:
        small = picture.convert("RGB").quantize(colors=96)
    small.save(path, optimize=True)


def _matplotlib(module: str) -> Any:
    """By name, because the types of an optional library are not there to be checked where it is not installed."""
    return importlib.import_module(f"matplotlib.{module}")


def _colours(panels: list[Panel]) -> dict[str, str]:
    """Of lines, by name: the same in every panel, for they share a legend."""
    names = dict.fromkeys(series.name for panel in panels if panel.kind == "lines" for series in panel.series)
    others = [name for name in names if name not in _COLOURS]
    return _COLOURS | {name: _LINES[index % len(_LINES)] for index, name in enumerate(others)}


def _draw_panel(axes: Any, panel: Panel, colours: dict[str, str]) -> None:
    if panel.kind == "lines":
        _lines(axes, panel, colours)
    else:
        {"bars": _bars, "stacked": _stacked}[panel.kind](axes, panel)
    if panel.band is not None:
        axes.axhspan(*panel.band, color=_BARS[1], alpha=0.45, linewidth=0, zorder=0, label="the paper's range")
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel(panel.x_label, fontsize=8)
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.tick_params(labelsize=8)
    if panel.log_y:
        axes.set_yscale("log")
        axes.set_yticks(_LOG_TICKS, [f"{tick:g}" for tick in _LOG_TICKS])
        values = [y for series in panel.series for y in series.y]
        axes.set_ylim(min(values) * 0.8, max(values) * 1.2)
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0, top=panel.y_max)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _lines(axes: Any, panel: Panel, colours: dict[str, str]) -> None:
    for index, series in enumerate(panel.series):
        axes.plot(
            series.x,
            series.y,
            label=series.name,
            color=colours[series.name],
            marker=_MARKERS[index % 6],
            markersize=3.5,
            linewidth=1.3,
        )
    if panel.bound is not None:
        axes.axhline(panel.bound, color="#777777", linestyle="--", linewidth=0.8)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for series in panel.series for x in series.x})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.grid(color="#e5e5e5", linewidth=0.6)


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for index, series in enumerate(panel.series):
        at = [place + (index - (len(panel.series) - 1) / 2) * width for place in range(len(panel.categories))]
        bars = axes.bar(at, series.y, width=width, label=series.name, color=_BARS[index % len(_BARS)])
        axes.bar_label(bars, [panel.value_format.format(y) for y in series.y], fontsize=6.5, padding=1)
    axes.set_xticks(range(len(panel.categories)), [_wrap(name) for name in panel.categories], fontsize=7)


def _stacked(axes: Any, panel: Panel) -> None:
    bottoms = [0.0] * len(panel.categories)
    pairs = [place * 0.9 + (0.25 if place % 2 == 0 else 0.0) for place in range(len(panel.categories))]
    for index, series in enumerate(panel.series):
        axes.bar(pairs, series.y, width=0.6, bottom=bottoms, label=series.name, color=_OTHERS[index])
        for place, bottom, share in zip(pairs, bottoms, series.y):
            if share >= 3:
                colour = "white" if index in (0, 2) else "black"
                text = panel.value_format.format(share)
                axes.text(place, bottom + share / 2, text, ha="center", va="center", fontsize=7.5, color=colour)
        bottoms = [bottom + share for bottom, share in zip(bottoms, series.y)]
    axes.set_xticks(pairs, [_wrap(name) for name in panel.categories], fontsize=7.5)


def _wrap(name: str) -> str:
    return name.replace(" (", "\n(")


def _legends(canvas: Any, grid: Any, panels: list[Panel]) -> None:
    """One for all panels, below them."""
    seen: dict[str, Any] = {}
    for axes in grid.flat[: len(panels)]:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            seen.setdefault(label, handle)
    if len(seen) > 1:
        canvas.legend(
            seen.values(), seen.keys(), loc="outside lower center", ncols=min(6, len(seen)), fontsize=8, frameon=False
        )
