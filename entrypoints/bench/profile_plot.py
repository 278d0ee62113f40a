"""A profile as a picture: each case one bar of its parts, and under it the floors of the same parts on the same scale.

Needs matplotlib, which only the extra `bench` brings; it is imported here alone, and only when a plot is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.observability.step_profile import (
    ATTENTION,
    ATTENTION_PLAN,
    CORE_PARTS,
    HAND_OVER,
    INPUTS,
    LOGITS,
    MODEL,
    RESULTS,
    SAMPLING,
)
from engine.observability.step_work import Ceilings
from entrypoints.bench.profile_cases import CaseFigures, PartFigures
from entrypoints.options import check_writable

_COLOURS = {
    MODEL: "#7b87b8",
    ATTENTION: "#f58518",
    ATTENTION_PLAN: "#ffbf79",
    LOGITS: "#54a24b",
    SAMPLING: "#b279a2",
    INPUTS: "#e45756",
    RESULTS: "#ff9da6",
    HAND_OVER: "#9d755d",
    **dict.fromkeys(CORE_PARTS, "#d6b8a3"),
}
_PIECES = ("#1f4e79", "#4c78a8", "#9ecae9", "#72b7b2", "#3a8f8a", "#bfe0de")
"""compiled pieces, in the order in which a step runs them"""
_REST, _REST_NAME = "#c7c7c7", "unaccounted"
_LABEL_FROM = 0.055
"""share of a bar from which a part's share is written into it"""


_FORMATS = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Raises ValueError for a file that could not be drawn, and with what to install where matplotlib is missing."""
    check_writable(file)
    if file.suffix not in _FORMATS:
        raise ValueError(f"--plot ends in one of {', '.join(_FORMATS)}, got {file.name!r}")
    require_matplotlib()


def require_matplotlib() -> None:
    """Raises ValueError with what to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'pageloom[bench]'")


def draw(cases: Sequence[CaseFigures], ceilings: Ceilings, path: Path) -> None:
    """Write the picture; the format follows the file's suffix. Raises ValueError without matplotlib."""
    require_matplotlib()
    figure = matplotlib_module("figure").Figure(figsize=(11.5, 1.7 + 0.86 * len(cases)), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    colours = _colours(cases)
    for index, case in enumerate(cases):
        _bar(axes, index, case, colours)
    _frame(axes, cases)
    _legend(figure, axes, colours)
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GOP/s" for name, rate in sorted(ceilings.ops_per_s.items()))
    figure.suptitle("Where a step's time goes, and the least that it could take", fontsize=12, x=0.01, ha="left")
    axes.set_title(
        f"floor: max(bytes / {ceilings.read_bytes_per_s / 1e9:.0f} GB/s, operations / ceiling), with {rates}, "
        "all measured in the same run",
        fontsize=8,
        loc="left",
        color="#555555",
    )
    figure.savefig(path)


def matplotlib_module(module: str) -> Any:
    """By name, because the types of an optional library are not there to be checked where it is not installed."""
    return importlib.import_module(f"matplotlib.{module}")


def _bar(axes: Any, index: int, case: CaseFigures, colours: dict[str, str]) -> None:
    """Everything as a share of the case's own time: prefills and decode steps differ by a thousand."""
    left = 0.0
    rest = PartFigures(name=_REST_NAME, ms=case.unaccounted_ms, calls=0, floor_ms=None, read_bytes=0, ops=0)
    for part in sorted([*case.parts, rest], key=lambda part: list(colours).index(part.name)):
        share = max(0.0, part.ms / case.wall_ms)
        axes.barh(index, share, left=left, height=0.5, color=colours[part.name], edgecolor="white", linewidth=0.6)
        if share >= _LABEL_FROM:
            colour = "white" if _is_dark(colours[part.name]) else "black"
            axes.text(left + share / 2, index, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
        left += share
    floor = 0.0
    for part in sorted(case.parts, key=lambda part: list(colours).index(part.name)):
        if part.floor_ms:
            width = part.floor_ms / case.wall_ms
            axes.barh(index + 0.36, width, left=floor, height=0.14, color=colours[part.name], linewidth=0)
            floor += width
    axes.plot([floor, floor], [index - 0.3, index + 0.45], color="black", linewidth=1.6, solid_capstyle="butt")
    undisturbed = f"{_ms(case.undisturbed_ms)} undisturbed\n" if case.undisturbed_ms is not None else ""
    note = f"{_ms(case.wall_ms)} per {case.per}\n{undisturbed}floor {_ms(case.floor_ms)}"
    axes.text(max(1.0, floor) + 0.012, index, note, va="center", fontsize=8)


def _frame(axes: Any, cases: Sequence[CaseFigures]) -> None:
    longest = max([1.0, *(case.floor_ms / case.wall_ms for case in cases)])
    axes.set_xlim(0, longest + 0.2)
    axes.set_ylim(len(cases) - 0.4, -0.5)
    axes.set_yticks(range(len(cases)), [textwrap.fill(case.case, 18) for case in cases], fontsize=9)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(matplotlib_module("ticker").PercentFormatter(1.0))
    axes.set_xlabel("share of the step's time (thick: spent; thin: the floor of the same parts)", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_bounds(0, 1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(figure: Any, axes: Any, colours: dict[str, str]) -> None:
    patch, line = matplotlib_module("patches").Patch, matplotlib_module("lines").Line2D
    handles = [patch(color=colour, label=textwrap.fill(name, 34)) for name, colour in colours.items()]
    handles.append(line([], [], color="black", linewidth=1.6, label="floor of the whole step"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=8, frameon=False, labelspacing=0.7)


def _colours(cases: Sequence[CaseFigures]) -> dict[str, str]:
    """A colour for each part that occurs, in the order of a step; pieces share one family of colours."""
    names = dict.fromkeys(part.name for case in cases for part in case.parts)
    pieces = [name for name in names if name not in _COLOURS]
    of_pieces = {name: _PIECES[i % len(_PIECES)] for i, name in enumerate(pieces)}
    known = {name: colour for name, colour in _COLOURS.items() if name in names}
    return {**of_pieces, **known, _REST_NAME: _REST}


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue < 140


def _ms(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} ms"
