"""A comparison as one JSON document, and the document as a table in text and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.sizes import parse_size
from peers import machine
from peers.catalogue import START
from peers.ratios import FIGURES, MEMORY, Cell, absolute_targets, cells, ratios, verdict
from peers.rounds import Measurement, Member, Rounds

SCHEMA = 1
NOISY_CORES = 0.15
"""others used more than this in a measurement behind the figure: it is marked"""
MEMORY_OVERHEAD_MIB = 700.0
ABOUT = {
    "W1": "W1 one request, 32 in / 128 out",
    "W2": "W2 64 requests, 128 / 128",
    "W3": "W3 128 requests, 16-512 / 16-256",
    "W4": "W4 64 requests, shared 512 + 32 / 32",
    "W5": "W5 2,048 in / 1 out",
    "W6": "W6 HTTP, Poisson 4/s, 128 / 64",
    "W7": "W7 20 requests, 32-256 / 64, width 4",
    START: "Start, in process",
    MEMORY: "Memory, in process",
}
Document = dict[str, Any]


def document(rounds: Rounds, label: str, repeats: int) -> Document:
    """All that was measured and what follows from it."""
    measurements = [*rounds.measurements, *_memory(rounds.members), *_first_starts(rounds)]
    kinds = {member.name: member.engine.kind for member in rounds.members}
    ours = {member.name for member in rounds.members if member.engine.ours}
    return {
        "tool": "compare_peers",
        "schema": SCHEMA,
        "label": label,
        "repeats": repeats,
        "machine": machine.facts(),
        "engines": [_engine(member) for member in rounds.members],
        "measurements": [asdict(m) for m in measurements],
        "ratios": [asdict(row) for row in ratios(measurements, kinds, ours)],
        "absolute_targets": absolute_targets(measurements, kinds, ours) + _memory_targets(rounds.members),
        "failures": [asdict(failure) for failure in rounds.failures],
    }


def markdown(doc: Document) -> str:
    """Figures (ours in bold), then ratios with targets."""
    return "\n\n".join(
        part for part in (_figures_table(doc), _ratio_table(doc), _absolute_table(doc), _notes(doc)) if part
    )


def text(doc: Document) -> str:
    """The same for a terminal: columns aligned."""
    return re.sub(r"(?:^\|.*\|\n?)+", lambda block: _aligned(block.group(0)), markdown(doc), flags=re.MULTILINE)


def pipe_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float) -> str:
    """Three or four digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _engine(member: Member) -> Document:
    return {
        "name": member.name,
        "mode": member.mode,
        "kind": member.engine.kind,
        "ours": member.engine.ours,
        "versions": member.versions,
        "facts": member.facts,
        "startups_s": [round(s, 2) for s in member.startups_s],
        "peak_memory_mib": round(member.peak_bytes / 2**20),
        "given_up": member.given_up,
    }


def _memory(members: Sequence[Member]) -> list[Measurement]:
    return [
        Measurement(MEMORY, m.name, 0, {"peak_memory_mib": round(m.peak_bytes / 2**20)}, 0.0, 0.0)
        for m in members
        if m.mode == "offline" and m.peak_bytes and not m.engine.floor
    ]


def _first_starts(rounds: Rounds) -> list[Measurement]:
    """Where starting was no workload of its own, how long it took anyway."""
    timed = {m.engine for m in rounds.measurements if m.workload == START}
    return [
        Measurement(START, m.name, repeat, {"startup_s": round(seconds, 2)}, 0.0, 0.0)
        for m in rounds.members
        if m.mode == "offline" and m.name not in timed and not m.engine.floor
        for repeat, seconds in enumerate(m.startups_s)
    ]


def _memory_targets(members: Sequence[Member]) -> list[Document]:
    """Peak memory against weights, configured KV and 700 MiB."""
    rows = []
    for m in members:
        weights, kv = (_ledger_mib(str(m.facts.get("ledger", "")), name) for name in ("weights", "KV cache"))
        if m.engine.ours and m.peak_bytes and weights is not None and kv is not None:
            peak, bound = m.peak_bytes / 2**20, weights + kv + MEMORY_OVERHEAD_MIB
            row = {"workload": MEMORY, "figure": "peak_memory_mib", "kind": m.engine.kind, "peer": None}
            rows.append({**row, "bound": round(bound), "engine": m.name, "value": round(peak), "met": peak <= bound})
    return rows


def _ledger_mib(ledger: str, row: str) -> float | None:
    found = re.search(rf"^\s*{re.escape(row)}\W+([\d.]+\s*[KMGT]?i?B)", ledger, re.MULTILINE)
    return parse_size(found.group(1)) / 2**20 if found else None


def _measured(doc: Document) -> dict[tuple[str, str, str], Cell]:
    return cells([Measurement(**m) for m in doc["measurements"]])


def _figures_table(doc: Document) -> str:
    table = _measured(doc)
    ours = {e["name"] for e in doc["engines"] if e["ours"]}
    names = list(dict.fromkeys(e["name"] for e in doc["engines"]))
    rows = []
    for workload, figures in FIGURES.items():
        for i, (figure, title) in enumerate(figures):
            found = [table.get((workload, figure, name)) for name in names]
            if any(found):
                cells_ = [_cell(cell, bold=name in ours) for name, cell in zip(names, found)]
                rows.append(["" if i else ABOUT[workload], title, *cells_])
    return pipe_table(["workload", "figure", *names], rows) if rows else ""


def _cell(cell: Cell | None, *, bold: bool) -> str:
    if cell is None:
        return "-"
    mark = " †" if cell.worst_outside_cores > NOISY_CORES else ""
    return (f"**{number(cell.median)}**" if bold else number(cell.median)) + mark


def _ratio_table(doc: Document) -> str:
    titles = {(w, f): title for w, figures in FIGURES.items() for f, title in figures}
    rows = [
        [
            r["workload"],
            titles[r["workload"], r["figure"]],
            r["ours"],
            r["peer"],
            f"**{r['ratio']:.2f}**",
            f"{r['low']:.2f} to {r['high']:.2f}",
            "" if r["target"] is None else f"{r['target']:g}",
            verdict(r["met"]),
        ]
        for r in doc["ratios"]
    ]
    header = ["workload", "figure", "ours", "peer", "ours / peer", "range", "target", "verdict"]
    return pipe_table(header, rows) if rows else ""


def _absolute_table(doc: Document) -> str:
    rows = [
        [ABOUT[t["workload"]], t["engine"], number(t["value"]), f"≤ {number(t['bound'])}", verdict(t["met"])]
        for t in doc["absolute_targets"]
    ]
    return pipe_table(["", "ours", "value", "target", "verdict"], rows) if rows else ""


def _notes(doc: Document) -> str:
    lines = [f"Medians of {doc['repeats']} alternations on {machine.sentence(doc['machine'])}."]
    versions = {name: version for e in doc["engines"] if not e["ours"] for name, version in e["versions"].items()}
    if versions:
        lines.append("Peers: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    if any(m["outside_cores"] > NOISY_CORES for m in doc["measurements"]):
        lines.append(f"† In at least one of its measurements other processes used more than {NOISY_CORES:g} cores.")
    if any(flag.startswith("amx") for flag in doc["machine"]["isa"]):
        lines.append("The targets were set for CPUs with AVX-512-BF16 and without AMX; this one has AMX.")
    lines += [f"Not measured: {f['engine']}, {f['doing']}: {_one_line(f['reason'])}" for f in doc["failures"]]
    return "\n".join(lines)


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:200].replace("|", "/")


def _aligned(block: str) -> str:
    lines = [[c.strip().replace("**", "") for c in line.strip("|").split("|")] for line in block.strip().splitlines()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines[1] = ["-" * width for width in widths]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines) + "\n"
