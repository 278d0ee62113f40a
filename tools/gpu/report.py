"""The suite's one JSON: how it grows out of the parts' lines, what it must look like, and the table printed of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gpu.parts import PARTS, Part
from gpu.targets import judge

SCHEMA = 2
STATUSES = (
    "passed",
    "failed",
    "unavailable",
    "timeout",
    "crashed",
    "cut off",
    "skipped",
    "not selected",
    "not run yet",
)
DONE = ("passed", "failed", "unavailable")
"""what a later run takes as it is"""
MAX_ATTEMPTS = 2
"""of a part that crashes or hangs"""
MAX_LISTED = 40
"""failures and skips listed per part; all are counted"""

Document = dict[str, Any]


def empty_document(dry: bool, minutes: float, started: str, sources: str = "") -> Document:
    parts = {part.name: empty_part(part) for part in PARTS}
    document = {"suite": "pageloom gpu suite", "schema": SCHEMA, "dry": dry, "started": started, "minutes": minutes}
    document |= {"sources": sources, "runs": 1}
    return document | {"seconds": 0.0, "finished": False, "parts": parts, "targets": []}


def empty_part(part: Part) -> Document:
    return {
        "kind": part.kind,
        "status": "not selected",
        "reason": "",
        "attempts": 0,
        "seconds": 0.0,
        "checks": {"passed": 0, "failed": 0},
        "failures": [],
        "notes": [],
        "skipped": [],
        "figures": {},
    }


def document_of_before(path: Path, dry: bool, minutes: float, sources: str) -> Document:
    """What an earlier run of the same tree left there, to be gone on with; else an empty one. A file of another tree,
    or that is damaged, is kept beside it."""
    fresh = empty_document(dry, minutes, time.strftime("%Y-%m-%dT%H:%M:%S"), sources)
    if not path.is_file():
        return fresh
    try:
        found: Document = json.loads(path.read_text())
        usable = all(found[key] == fresh[key] for key in ("schema", "dry", "sources"))
        usable = usable and set(found["parts"]) == set(fresh["parts"])
    except (ValueError, KeyError, TypeError):
        usable = False
    if not usable:
        path.replace(path.with_suffix(".before.json"))
        return fresh
    return found | {"minutes": minutes, "finished": False, "runs": found["runs"] + 1}


def is_done(entry: Document) -> bool:
    """Whether a later run has nothing to add: the part came to an end of its own, or had chances enough."""
    return entry["status"] in DONE or entry["attempts"] >= MAX_ATTEMPTS


def read_part(part: Part, lines: Path, code: int | None, log: Path, seconds: float, short: bool = False) -> Document:
    """From what the part's process wrote. `code`: its exit code; None: it was ended at its limit. `short`: because
    the suite's time was over, so that what it left out for time, a later run does."""
    entry = empty_part(part)
    entry["seconds"], entry["attempts"] = round(seconds, 1), 1
    end: Document | None = None
    for raw in lines.read_text().splitlines() if lines.is_file() else []:
        try:
            line = json.loads(raw)
        except json.JSONDecodeError:
            continue  # the process was ended in the middle of it
        if "figure" in line:
            entry["figures"].setdefault(line["figure"], []).append(line["value"])
        elif "check" in line:
            entry["checks"]["passed" if line["problem"] is None else "failed"] += 1
            if line["problem"] is not None and len(entry["failures"]) < MAX_LISTED:
                entry["failures"].append({"name": line["check"], "problem": line["problem"]})
            elif line.get("note"):
                entry["notes"].append({"name": line["check"], "note": line["note"]})
        elif "skipped" in line:
            if len(entry["skipped"]) < MAX_LISTED:
                entry["skipped"].append({"name": line["skipped"], "reason": line["reason"]})
        elif "end" in line:
            end = line
    if end is not None:
        entry["status"], entry["reason"] = end["end"], end["reason"]
    elif code is None and short:
        entry["status"], entry["reason"] = "cut off", f"the suite ended after {seconds:.0f} s of it; that is here"
    elif code is None:
        entry["status"], entry["reason"] = "timeout", f"ended after {seconds:.0f} s; what it had found is here"
    else:
        entry["status"], entry["reason"] = "crashed", f"exit code {code}: {_tail(log)}"
    if entry["status"] == "passed" and entry["checks"]["failed"]:
        entry["status"] = "failed"
    if short and entry["status"] == "passed" and any(skip["reason"] == "no time" for skip in entry["skipped"]):
        entry["status"], entry["reason"] = "cut off", "the suite's time was over before it had done all"
    if entry["status"] == "cut off":
        entry["attempts"] = 0
    return entry


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-8:]) if log.is_file() else ""


def write(document: Document, path: Path) -> None:
    """Whole or not at all: the file is read while the suite runs, and when it is killed."""
    document["targets"] = judge(document)
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(document, indent=1))
    half.replace(path)


def problems(document: Document) -> list[str]:
    """What is not as the schema says; empty for a document that is."""
    found = [f"no {key}" for key in empty_document(False, 0, "") if key not in document]
    if found:
        return found
    for part in PARTS:
        entry = document["parts"].get(part.name)
        if entry is None:
            found.append(f"part {part.name} is not reported")
            continue
        found += [f"part {part.name} has no {key}" for key in empty_part(part) if key not in entry]
        if entry.get("status") not in STATUSES:
            found.append(f"part {part.name} has status {entry.get('status')!r}")
        if entry.get("status") not in ("passed", "not selected") and not (entry.get("reason") or entry["failures"]):
            found.append(f"part {part.name} is {entry.get('status')} for no reason")
    if not document["targets"]:
        found.append("no target is judged")
    for target in document["targets"]:
        if set(target) != {"name", "target", "measured", "verdict"}:
            found.append(f"target {target.get('name')!r} has keys {sorted(target)}")
        elif target["verdict"] not in ("pass", "fail", "not measured", "dry"):
            found.append(f"target {target['name']!r} has verdict {target['verdict']!r}")
    return found


def table(document: Document) -> str:
    """Parts, then targets, short enough to be the end of a log."""
    lines = [f"{'part':<32}{'status':<14}{'s':>6}{'checks':>12}  remark"]
    for name, part in document["parts"].items():
        if part["status"] == "not selected":
            continue
        checks = part["checks"]
        count = f"{checks['passed']}/{checks['passed'] + checks['failed']}" if sum(checks.values()) else ""
        remark = part["failures"][0]["problem"] if part["failures"] else part["reason"]
        if not remark and part["skipped"]:
            remark = f"{len(part['skipped'])} left out, first: {part['skipped'][0]['reason']}"
        lines.append(f"{name:<32}{part['status']:<14}{part['seconds']:>6.0f}{count:>12}  {_one_line(remark)}")
    lines += ["", f"{'target':<52}{'measured':>12}  {'verdict':<14}wanted"]
    for target in document["targets"]:
        measured = "-" if target["measured"] is None else f"{target['measured']:.4g}"
        lines.append(f"{target['name']:<52}{measured:>12}  {target['verdict']:<14}{target['target']}")
    left = [name for name, part in document["parts"].items() if _is_left(part)]
    end = f"{len(left)} parts are left: the same command again goes on with them" if left else "all parts reported"
    end = end if document["finished"] else "not finished"
    dry = ", dry run: the figures mean nothing" if document["dry"] else ""
    lines.append(f"{document['seconds']:.0f} s, {end}{dry}")
    return "\n".join(lines)


def _is_left(part: Document) -> bool:
    return part["status"] != "not selected" and not is_done(part)


def _one_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:100] if lines else ""
