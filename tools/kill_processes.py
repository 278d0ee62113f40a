"""Two replicas of two ranks each, without a model: their processes are killed and stopped at random, with requests
running, and the front end now and then.

Prints JSON: how long it took until it was told (of a stopped core by `stalled`, else by a replica less, or by nothing
that is left of a killed front end), in seconds; processes and files in shared memory that are left. Usage:
``python tools/kill_processes.py [--rounds 100]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from random import Random

sys.path += [str(Path(__file__).parents[1] / "tests" / room) for room in ("core", "executor", "replicas")]

from chaos import MODES, Chaos, kill_the_front_end  # type: ignore[import-not-found]  # of the tests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    random, before = Random(asked.seed), set(os.listdir("/dev/shm"))
    seconds: dict[str, list[float]] = {mode: [] for mode in (*MODES, "kill front end")}
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), asked.seed)
        for index in range(asked.rounds):
            mode = random.choice([*seconds])
            if mode == "kill front end":
                seconds[mode].append(kill_the_front_end(Path(folder)))
            else:
                chaos.round(index, mode)
                seconds[mode].append(chaos.reported_s[-1])
        left = chaos.close()
    told = {
        mode: {"times": len(each), "median_s": round(statistics.median(each), 3), "max_s": round(max(each), 3)}
        for mode, each in seconds.items()
        if each
    }
    files = len(set(os.listdir("/dev/shm")) - before)
    print(json.dumps({"rounds": asked.rounds, "told": told, "processes_left": left, "files_left": files}))


if __name__ == "__main__":
    main()
