"""The evaluation as files: `paper.md` (tables beside the paper's values), `paper.json`, and a PNG for each figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from entrypoints.bench.paper.figure import Figure, Table
from entrypoints.bench.paper.published import SOURCES


def write(figures: Sequence[Figure], out: Path, about: Sequence[str], settings: dict[str, object], plots: bool) -> None:
    """`about`: paragraphs before the figures."""
    out.mkdir(parents=True, exist_ok=True)
    parts = [
        "# The PagedAttention paper's evaluation, run again",
        "Written by `engine-bench paper`; do not edit.",
        *about,
    ]
    for figure in figures:
        parts += [f"## {figure.title}", figure.about, *(_markdown(table) for table in figure.tables)]
        if plots and figure.panels:
            from entrypoints.bench.paper.plots import draw

            draw(figure, out / f"paper_{figure.key}.png")
            parts.append(f"![{figure.title}](paper_{figure.key}.png)")
        parts += figure.remarks
        if figure.key in SOURCES:
            parts.append(f"Where the paper's values are from. {SOURCES[figure.key]}")
    (out / "paper.md").write_text("\n\n".join(parts) + "\n")
    data = {"settings": settings, "figures": {figure.key: _rounded(figure.data) for figure in figures}}
    (out / "paper.json").write_text(json.dumps(data, indent=1) + "\n")


def _markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rounded(value: object) -> object:
    """To six digits, so that a file shows what differs."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value
