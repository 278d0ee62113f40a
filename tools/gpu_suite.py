"""Every check and every measurement that needs a GPU, in one command, from a source tree, without a network.

    python3 tools/gpu_suite.py OUT [--dry] [--only NAME,NAME] [--minutes 9]

Writes OUT/gpu_suite.json (kept whole while the suite runs) and prints a table as its last lines; docs/gpu.md says how
to read it. Run again with the same OUT it goes on: parts that have reported are not run again.

`--dry` runs the same code on a machine without a GPU, on a pretend one, in toy sizes. Exits 0 when every
part passed and no target was missed, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from gpu.context import Context, UnavailableError, pretending  # noqa: E402 - the path comes first
from gpu.device import open_device  # noqa: E402
from gpu.launch import Settings, run_suite  # noqa: E402
from gpu.parts import PARTS, part_named  # noqa: E402


def run_part(name: str, out: Path, seconds: float, dry: bool, cache_dir: Path) -> int:
    """One part, in this process; its findings go to OUT/parts/NAME.jsonl, line by line."""
    deadline = time.monotonic() + seconds
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    folder = out / "parts"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a") as lines, tempfile.TemporaryDirectory() as scratch:
        try:
            with pretending() if dry else nullcontext():
                context = Context(open_device(dry), deadline, cache_dir, Path(scratch), lines)
                part_named(name).run(context)
            end, reason = ("failed", f"{context.failures} checks failed") if context.failures else ("passed", "")
        except UnavailableError as error:
            end, reason = "unavailable", str(error)
        except ModuleNotFoundError as error:
            traceback.print_exc()
            end, reason = "unavailable", f"a package is missing: {error}"
        except Exception as error:
            traceback.print_exc()
            end, reason = "failed", f"{type(error).__name__}: {error}"
        lines.write(json.dumps({"end": end, "reason": reason}) + "\n")
    return int(end == "failed")


def _end_with_parent(parent: int) -> None:
    """A suite that was killed leaves no part behind that holds the GPU."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def sources_hash() -> str:
    """Of all that the parts run."""
    digest = hashlib.sha256()
    for folder in ("engine", "compilation", "attention_backends", "tools/gpu", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh") and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the JSON and the parts' logs")
    parser.add_argument("--dry", action="store_true", help="no GPU: a pretend one and toy sizes, the same code")
    parser.add_argument("--only", help=f"some of: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default 9)")
    parser.add_argument("--cache", type=Path, help="compiled kernels and pieces (default: a temporary folder)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in (options.only or PARTS[0].name).split(","):
        try:
            part_named(name)
        except ValueError as error:
            parser.error(str(error))
    default = Path(tempfile.gettempdir()) / f"pageloom_gpu_suite{'_dry' if options.dry else ''}"
    cache_dir: Path = (options.cache or default).resolve()
    cache_dir.mkdir(parents=True, exist_ok=True)
    if options.part is not None:
        return run_part(options.part, options.out, options.seconds, options.dry, cache_dir)
    settings = Settings(
        script=Path(__file__).resolve(),
        out=options.out.resolve(),
        cache_dir=cache_dir,
        dry=options.dry,
        only=options.only,
        minutes=options.minutes,
        sources=sources_hash(),
    )
    return run_suite(settings)


if __name__ == "__main__":
    sys.exit(main())
