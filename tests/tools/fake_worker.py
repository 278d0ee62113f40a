"""A worker as `compare_peers` sees one, that computes nothing. Its one argument says how it behaves, as JSON.

It writes one line to `log` for every measurement it makes, and counts up in `alive` as long as it is not paused.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time


def main(settings: dict[str, object]) -> None:
    name, log = settings["name"], str(settings["log"])
    if settings.get("dies_at_start"):
        print("no such model", file=sys.stderr)
        raise SystemExit(3)
    if settings.get("hangs_at_start"):
        time.sleep(600)
    threading.Thread(target=tick, args=(str(settings["alive"]),), daemon=True).start()
    print(json.dumps({"ready": {"versions": {str(name): "1"}, "facts": {}}}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        with open(log, "a") as file:
            file.write(f"{name} {order['workload']} {order['repeat']} {time.monotonic()} {os.getpid()}\n")
        what = settings.get("does", {}).get(order["workload"], "answers")  # type: ignore[attr-defined]  # a JSON object
        if what == "dies":
            os._exit(11)
        if what == "hangs":
            time.sleep(600)
        if what == "babbles":
            print("Loading weights: 100%", flush=True)
            continue
        if what == "refuses":
            print(json.dumps({"error": "ValueError: too long"}), flush=True)
            continue
        time.sleep(0.02)
        values = settings["values"]
        value = values[order["repeat"] % len(values)] if order["repeat"] >= 0 else 1e9  # type: ignore[index,arg-type]
        figures = {"requests": 1, "failed": 0, "short": 1 if what == "ends early" else 0, "wall_s": value}
        figures |= {"tpot_mean_ms": value, "ttft_mean_ms": 2 * value, "output_tokens_per_s": value}
        print(json.dumps({"figures": figures}), flush=True)


def tick(path: str) -> None:
    count = 0
    while True:
        count += 1
        with open(path, "w") as file:
            file.write(str(count))
        time.sleep(0.01)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
