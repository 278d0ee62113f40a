"""Writes `docs/results/cpu.md` from what the benchmarks measured: every figure on the page comes out of their JSON.

    python tools/compare_peers.py ... --out results
    python tools/bench_start.py > results/start.txt            # any bench: its output, or the last line of it
    python tools/results_cpu.py --compare results/compare_peers.json --start results/start.txt --out docs/results/cpu.md

The words around the tables are in `tools/results_cpu.template.md`. What was not measured is said to be so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path += [path for path in (str(Path(__file__).resolve().parents[1]),) if path not in sys.path]

from peers import machine, report

TEMPLATE = Path(__file__).with_name("results_cpu.template.md")
PLACE = re.compile(r"\{\{(\w+)\}\}")
NOT_MEASURED = "*Not measured in this run.*"
Json = dict[str, Any]


def read_json(path: Path) -> Json:
    """A JSON file, or the output of a tool whose last line is JSON. Raises ValueError for anything else."""
    text = path.read_text()
    for candidate in (text, *text.strip().splitlines()[-1:]):
        try:
            document = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(document, dict):
            return document
    raise ValueError(f"{path}: neither JSON nor output that ends with a JSON object")


def flat(row: Json, prefix: str = "") -> Json:
    """Nested objects become dotted names; lists are left out."""
    found: Json = {}
    for name, value in row.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            found[prefix + name] = value
    return found


def cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return report.number(value) if isinstance(value, float) else str(value).replace("|", "/")


def table_of(rows: Sequence[Json]) -> str:
    """One line a row; columns in the order in which they first appear."""
    flattened = [flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flattened for name in row))
    header = [name.replace("_", " ") for name in columns]
    return report.pipe_table(header, [[cell(row.get(name)) for name in columns] for row in flattened])


def tables(document: Json, skip: Sequence[str] = ()) -> str:
    """Any benchmark's JSON: its lists of rows as tables, its single figures as one line."""
    parts = []
    single = {
        name: value for name, value in document.items() if not isinstance(value, dict | list) and name not in skip
    }
    if single:
        parts.append(", ".join(f"{name.replace('_', ' ')} {cell(value)}" for name, value in single.items()) + ".")
    for name, value in document.items():
        if name in skip:
            continue
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            parts.append(f"{name.replace('_', ' ').capitalize()}:\n\n{table_of(value)}")
        elif isinstance(value, dict) and value and all(isinstance(row, dict) for row in value.values()):
            parts.append(table_of([{name.replace("_", " "): key, **row} for key, row in value.items()]))
        elif isinstance(value, dict) and value:
            parts.append(table_of([value]))
    return "\n\n".join(parts)


def compare(documents: Sequence[Json]) -> str:
    return "\n\n".join((f"### {d['label']}\n\n" if d["label"] else "") + report.markdown(d) for d in documents)


def start(document: Json) -> str:
    """The medians; how the single starts went is left to the JSON."""
    rows = [{"caches": kind, "starts": len(document["starts"][kind]), **m} for kind, m in document["median"].items()]
    return table_of(rows)


def profile(document: Json) -> str:
    """A line a case beside its floor, then the parts of each."""
    cases = document["results"]
    summary = [
        {
            "case": case["case"],
            f"ms per {case['per']}": case["undisturbed_ms"] if case["undisturbed_ms"] is not None else case["wall_ms"],
            "floor ms": case["floor_ms"],
        }
        for case in cases
    ]
    parts = [table_of(summary)]
    for case in cases:
        rows = [
            {
                "part": part["name"],
                "calls": round(part["calls"]),
                "ms": part["ms"],
                "share": f"{100 * part['ms'] / case['wall_ms']:.1f} %",
                "floor ms": part["floor_ms"],
            }
            for part in case["parts"]
        ]
        parts.append(f"{case['case']}:\n\n{table_of(rows)}")
    return "\n\n".join(parts)


def plain(*skip: str) -> Callable[[Json], str]:
    return lambda document: tables(document, skip)


SECTIONS: dict[str, Callable[[Json], str]] = {
    "start": start,
    "profile": profile,
    "linear": plain(),
    "attention": plain(),
    "sampling": plain(),
    "host": plain(),
}


def page(template: str, found: dict[str, str], facts: Json) -> str:
    """Every `{{name}}` filled. Raises ValueError for a name that stands for nothing."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "machine":
            return machine.sentence(facts)
        if name not in (*SECTIONS, "compare"):
            raise ValueError(f"the template names {{{{{name}}}}}, which nothing measures")
        return found.get(name, NOT_MEASURED)

    return PLACE.sub(fill, template)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compare", type=Path, action="append", default=[], help="of tools/compare_peers.py, also several"
    )
    for name in SECTIONS:
        tool = "engine-bench profile --json" if name == "profile" else f"tools/bench_{name}.py"
        parser.add_argument(f"--{name}", type=Path, help=f"of {tool}")
    parser.add_argument("--template", type=Path, default=TEMPLATE)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    try:
        comparisons = [read_json(path) for path in options.compare]
        found = {
            name: render(read_json(path))
            for name, render in SECTIONS.items()
            if (path := getattr(options, name)) is not None
        }
        if comparisons:
            found["compare"] = compare(comparisons)
        facts = comparisons[0]["machine"] if comparisons else machine.facts()
        options.out.write_text(page(options.template.read_text(), found, facts))
    except (OSError, ValueError, KeyError) as error:
        print(f"results_cpu: {error!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
