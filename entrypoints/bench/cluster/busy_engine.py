"""An engine that computes until it is killed, for who measures beside it. As a program it takes an `EngineConfig` as
JSON from stdin, and says in a line that it begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import DEVNULL, PIPE, Popen

import msgspec

from engine.child import python_command
from engine.config import EngineConfig
from engine.errors import EngineError

_NAME = "entrypoints.bench.cluster.busy_engine"


@contextmanager
def busy_engine(config: EngineConfig) -> Iterator[None]:
    """Raises EngineError where it does not start."""
    process = Popen(python_command(_NAME), stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        if not process.stdout.readline():
            raise EngineError("the engine that was to compute beside the one that is measured did not start")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    from entrypoints.bench.cluster.measure import Measurement

    measurement = Measurement(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig), seed=1)
    print("begins", flush=True)
    while True:
        measurement.round()


if __name__ == "__main__":
    main()
