"""One engine, loaded once, that measures a workload whenever it is told to. Runs under the engine's own Python.

    python -P worker.py ADAPTER SETTINGS_JSON

Each line on stdin asks, each line on stdout answers, both JSON. `{"workload": W, "repeat": N}` is answered by
`{"figures": {...}}` or `{"error": "..."}`; the first line, `{"ready": {...}}`, comes after the first generated token.
What libraries print goes to stderr. Needs numpy and the engine itself, nothing of this project's dependencies.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

FIRST_TOKEN_PROMPT = [504, 3575, 282, 4649, 314]


class Adapter(Protocol):
    """What an adapter's `load(settings)` returns."""

    versions: dict[str, str]
    facts: dict[str, Any]
    """anything worth recording: settings in use, the size of the KV cache"""

    def run(self, requests: list[Any]) -> tuple[list[Any], float, float]:
        """All `BenchRequest`s at once, greedy, exact lengths: their `Record`s, and when the run began and ended."""
        ...


def serve(adapter_name: str, settings: dict[str, Any]) -> None:
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from entrypoints.bench.metrics import figures
    from entrypoints.bench.workloads import BenchRequest, workload

    adapter: Adapter = importlib.import_module(f"peers.adapter_{adapter_name}").load(settings)
    adapter.run([BenchRequest(FIRST_TOKEN_PROMPT, 1, 0.0)])
    print(json.dumps({"ready": {"versions": adapter.versions, "facts": adapter.facts}}), file=channel)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = {"figures": figures(*adapter.run(workload(order["workload"], order["repeat"])))}
        except Exception as error:  # whatever the library raises is that peer's result
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    tools = Path(__file__).resolve().parents[1]
    sys.path += [str(tools.parent), str(tools)]
    serve(sys.argv[1], json.loads(sys.argv[2]))
