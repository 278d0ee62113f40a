"""This engine and others on the same workloads, in alternation in one run, as ratios beside the targets.

    python tools/compare_peers.py --peers-dir DIR --peers llamacpp:W1 openvino:W2,W3,W5 vllm:W2,W4 --out results/

Each engine is a process that is loaded once and measures when its turn comes; the others are stopped meanwhile
(SIGSTOP), or ended where memory is short. An engine that dies or hangs is reported and the run goes on. docs/peers.md
says how to set the peers up. The last line of the output is the path of the JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.path += [path for path in (str(Path(__file__).resolve().parents[1]),) if path not in sys.path]

from peers import plot, report
from peers.catalogue import TAKEN, Engine, our_engine, parse_peers, peer_engine, workload_list
from peers.ratios import target_workloads
from peers.rounds import Limits, Rounds

DEFAULT_MODEL = "models/smollm2-135m-bf16"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[],
        metavar="NAME[:W1,W2]",
        help="peers, each with its workloads or the usual ones",
    )
    parser.add_argument("--peers-dir", type=Path, help="what tools/peers/setup.sh filled")
    parser.add_argument("--workload", type=workload_list, metavar="W1,W2", help=f"only these, of {','.join(TAKEN)}")
    parser.add_argument(
        "--ours",
        action="append",
        metavar="[LABEL[:W1,W2]=]OPTIONS",
        help="engine options, and a model where it is not --model; several times for several configurations",
    )
    parser.add_argument("--model", help="of --ours; default: the bf16 one in --peers-dir, else the demo model")
    parser.add_argument("--reps", type=int, default=3, help="alternations")
    parser.add_argument("--threads", type=int, help="of every engine; default: each usable CPU for peers, ours chooses")
    parser.add_argument("--label", default="", help="title of the run")
    parser.add_argument("--out", type=Path, default=Path("compare_peers"), help="folder of JSON, Markdown and plot")
    parser.add_argument("--start-timeout", type=float, default=Limits.start_s, metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=Limits.measure_s, metavar="SECONDS", help="of a measurement")
    parser.add_argument("--budget", type=float, default=Limits.budget_s, metavar="SECONDS", help="of the whole run")
    parser.add_argument("--quiet-wait", type=float, default=Limits.quiet_wait_s, metavar="SECONDS")
    parser.add_argument("--no-plot", dest="plot", action="store_false")
    return parser


def engines(options: argparse.Namespace) -> list[Engine]:
    """Ours first. Raises ValueError for what cannot take part."""
    chosen = parse_peers(options.peers)
    folder = options.peers_dir.resolve() if options.peers_dir is not None else None
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    peers = [
        peer_engine(name, folder, options.threads or usable, taken or options.workload)
        for name, taken in chosen.items()
    ]
    with_peers = {w for peer in peers for w in peer.workloads} or set(options.workload or TAKEN[:5])

    def default(kind: str) -> tuple[str, ...]:
        if options.workload:
            return tuple(options.workload)
        return tuple(w for w in TAKEN if w in with_peers and (kind == "bf16" or w in target_workloads(kind)))

    model = options.model
    if model is None and folder is not None and (folder / DEFAULT_MODEL).is_dir():
        model = str(folder / DEFAULT_MODEL)
    ours = [our_engine(text, model, options.threads, default) for text in options.ours or ["pageloom="]]
    names = [engine.name for engine in (*ours, *peers)]
    if len(names) != len(set(names)):
        raise ValueError(f"two engines have one name: {', '.join(names)}; give --ours labels")
    return ours + peers


def write(doc: report.Document, options: argparse.Namespace) -> Path:
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / "compare_peers.json"
    path.write_text(json.dumps(doc, indent=1) + "\n")
    (options.out / "compare_peers.md").write_text(report.markdown(doc) + "\n")
    if options.plot:
        try:
            plot.save(doc, options.out / "compare_peers.png")
        except ImportError:
            print("no plot: matplotlib is missing (pip install 'pageloom[bench]')", file=sys.stderr)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.reps < 1:
        parser.error("--reps must be at least 1")
    try:
        chosen = engines(options)
    except ValueError as error:
        parser.error(str(error))
    order = [w for w in TAKEN if any(w in engine.workloads for engine in chosen)]
    limits = Limits(options.start_timeout, options.timeout, quiet_wait_s=options.quiet_wait, budget_s=options.budget)
    rounds = Rounds(chosen, limits)
    signal.signal(signal.SIGTERM, _end)  # so that paused processes are not left behind
    interrupted = False
    try:
        rounds.run(order, options.reps)
    except KeyboardInterrupt:
        interrupted = True
    doc = report.document(rounds, options.label, options.reps)
    print(report.text(doc))
    print(write(doc, options))
    return 130 if interrupted else 1 if doc["failures"] else 0


def _end(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
