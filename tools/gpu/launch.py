"""Runs the parts, each in a process of its own with a limit, so that a failure, a crash or a hang costs one part.

The document is written after every part, and a later run into the same folder goes on where it ended: what it has is
not run again. A suite that is ended from outside has lost only what was running, and keeps what that had found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from gpu.parts import STAGES, Part, chosen
from gpu.report import Document, document_of_before, is_done, read_part, table, write

TOGETHER, TOGETHER_DRY = 12, 2
"""parts at once in a stage that times nothing, and in any stage of a dry run"""
POLL_S = 0.1
REPORT_S = 2.0
"""kept back for the report"""
GRACE_S = 6.0
"""a part is asked to be done so long before it is ended"""


@dataclass(frozen=True)
class Settings:
    script: Path
    """the suite's entry, which runs one part when told its name"""
    out: Path
    cache_dir: Path
    dry: bool
    only: str | None
    minutes: float
    sources: str
    """hash of the tree: what another one found is not gone on with"""


class Running:
    """One part's process."""

    def __init__(self, part: Part, settings: Settings, left_s: float) -> None:
        limit_s = min(part.limit_s, left_s)
        self._short = left_s < part.limit_s
        folder = settings.out / "parts"
        self.part = part
        self.lines, self.log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
        self.lines.unlink(missing_ok=True)
        self._limit_s = limit_s
        command = [sys.executable, str(settings.script), str(settings.out), "--part", part.name]
        command += ["--seconds", f"{max(1.0, limit_s - GRACE_S):.1f}", "--cache", str(settings.cache_dir)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        if part.stage == "check":
            environment |= {"OMP_NUM_THREADS": "2"}  # many at once
        if settings.dry:
            command.append("--dry")
            environment["OMP_NUM_THREADS"] = "1"
            environment["TRITON_INTERPRET"] = "1"
        self._log: TextIO = self.log.open("w")
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def poll(self) -> Document | None:
        """The part's entry once it has ended, by itself or at its limit."""
        code = self._process.poll()
        seconds = time.monotonic() - self._started
        if code is None and seconds < self._limit_s:
            return None
        self.end()
        return self.entry(code, self._short)

    def entry(self, code: int | None, short: bool) -> Document:
        """What its process has written. `short`: it was given less than its own limit, or ended before that."""
        return read_part(self.part, self.lines, code, self.log, time.monotonic() - self._started, short)

    def end(self) -> None:
        """End the process and those that it started."""
        with contextlib.suppress(ProcessLookupError):  # it and its children have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class Suite:
    """One run over the chosen parts."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._began = time.monotonic()
        self._end = self._began + 60 * settings.minutes - REPORT_S
        self._path = settings.out / "gpu_suite.json"
        self.document = document_of_before(self._path, settings.dry, settings.minutes, settings.sources)
        self._spent_before = float(self.document["seconds"])
        self._chosen = [part for part in chosen(settings.only) if not is_done(self.document["parts"][part.name])]
        for part in self._chosen:
            entry = self.document["parts"][part.name]
            if entry["status"] in ("not run yet", "not selected", "skipped"):
                entry["status"], entry["reason"] = "not run yet", "the suite was ended before"

    def run(self) -> Document:
        (self._settings.out / "parts").mkdir(parents=True, exist_ok=True)
        self._save()
        for stage, together in STAGES:
            parts = [part for part in self._chosen if part.stage == stage]
            parts.sort(key=lambda part: self.document["parts"][part.name]["attempts"])  # what hung once comes last
            at_once = TOGETHER if together else 1
            self._run_stage(parts, TOGETHER_DRY if self._settings.dry else at_once)
        self.document["finished"] = True
        self._save()
        return self.document

    def _run_stage(self, parts: list[Part], at_once: int) -> None:
        waiting, running = list(parts), list[Running]()
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    part = waiting.pop(0)
                    left = self._end - time.monotonic()
                    if left >= part.need_s:
                        running.append(Running(part, self._settings, left))
                    elif self.document["parts"][part.name]["attempts"] == 0:  # else that stays
                        self._report(part, {"status": "skipped", "reason": "no time"})
                for each in list(running):
                    entry = each.poll()
                    if entry is not None:
                        running.remove(each)
                        self._report(each.part, entry)
                time.sleep(POLL_S)
        finally:
            for each in running:  # ended from outside
                each.end()
                self._report(each.part, each.entry(None, short=True))

    def _report(self, part: Part, entry: Document) -> None:
        attempts = self.document["parts"][part.name]["attempts"] + entry.get("attempts", 0)
        self.document["parts"][part.name].update(entry | {"attempts": attempts})
        if "reason" in entry and entry["status"] == "passed":
            self.document["parts"][part.name]["reason"] = ""
        self._save()
        print(f"{self.document['seconds']:6.0f} s  {part.name}: {entry['status']}", flush=True)

    def _save(self) -> None:
        self.document["seconds"] = round(self._spent_before + time.monotonic() - self._began, 1)
        write(self.document, self._path)


def run_suite(settings: Settings) -> int:
    """Exit status: 1 where a part failed or a target was missed."""
    signal.signal(signal.SIGTERM, _leave)
    document = Suite(settings).run()
    print()
    print(table(document), flush=True)
    failed = any(part["status"] in ("failed", "crashed", "timeout") for part in document["parts"].values())
    return int(failed or any(target["verdict"] == "fail" for target in document["targets"]))


def _leave(number: int, frame: FrameType | None) -> None:
    """What runs is ended and reported on the way out."""
    sys.exit(128 + number)
