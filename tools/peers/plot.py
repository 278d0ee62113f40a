"""Ratios as a picture: how many times as good as each peer, with the targets as ticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.catalogue import START
from peers.ratios import FIGURES, MORE_IS_BETTER

TARGET_MARK = 9


def advantages(doc: dict[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """(row, ours, times as good as the peer, the same that the target asks for); headline figures only."""
    rows = []
    for r in doc["ratios"]:
        headline = FIGURES[r["workload"]][0][0]
        if r["workload"] == START or (r["target"] is None and r["figure"] != headline) or r["ratio"] <= 0:
            continue
        invert = r["figure"] not in MORE_IS_BETTER
        times = 1 / r["ratio"] if invert else r["ratio"]
        wanted = None if r["target"] is None else 1 / r["target"] if invert else r["target"]
        rows.append((f"{r['workload']} {r['figure'].removesuffix('_ms')} vs {r['peer']}", r["ours"], times, wanted))
    return rows


def save(doc: dict[str, Any], path: Path) -> None:
    """Raises ImportError where matplotlib is missing (the extra `bench` brings it)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = advantages(doc)
    names = list(dict.fromkeys(ours for _, ours, _, _ in rows))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.36 * max(1, len(rows))))
    for y, (_, ours, times, wanted) in enumerate(rows):
        axes.barh(y, times, color=colours[ours], height=0.7)
        axes.text(times, y, f" {times:.2f}x", va="center", fontsize=8)
        if wanted is not None:
            axes.plot([wanted], [y], marker="|", color="black", markersize=TARGET_MARK, markeredgewidth=2)
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [row for row, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times as good as the peer (black tick: target)")
    axes.legend([pyplot.Rectangle((0, 0), 1, 1, color=colours[n]) for n in names], names, fontsize=8, loc="lower right")
    axes.set_title(doc["label"] or doc["machine"]["cpu"], fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
