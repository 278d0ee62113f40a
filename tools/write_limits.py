"""Writes docs/limits.md from `engine.limits`. usage: python tools/write_limits.py [--check]"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from engine.config import EngineArgs
from engine.limits import RANGES, Limits, about, plain

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"

HEAD = """# Limits

Written by `tools/write_limits.py` from `engine/limits.py`, where each bound stands once; do not edit it here.

What exceeds a limit is refused before it costs anything, alone, with the field, the limit and the setting in the error.
`--limit NAME=VALUE` sets one (`engine-serve`, `engine-bench`, `engine-chat`; repeat it for more), and in Python
`limits={"NAME": VALUE}`.

| limit | default | at most so many | HTTP |
|---|---|---|---|
"""

RANGES_HEAD = """
## Values that a parameter may take

Others are a 400 that names the parameter (in Python an `InvalidRequestError`).

| parameter | range |
|---|---|
"""

TAIL = """
## What follows from the model and the machine

| limit | where it comes from |
|---|---|
| tokens of a prompt and its answer | `--max-model-len`; else the model's own, cut to what `--kv-cache-memory` holds |
| characters of a text before it is tokenized | the context length times the longest token |
| token ids | the vocabulary |
| sequences that run at once, beams of a search | `--max-num-seqs` |
| sequences that find no row; any where none waits; of a key 7/8 (`fair`) | `--max-waiting`, {waiting}: 503 |
| alternatives of a token (`logprobs`, `prompt_logprobs`) | `--max-logprobs`, {logprobs} |
| seconds after SIGTERM in which new requests are still taken | `--drain-delay` |
| seconds that running requests may go on behind those | `--shutdown-timeout` |
"""


def page() -> str:
    rows = [
        f"| `{field.name}` | {plain(field.default)} | {about(field.name).what} | {about(field.name).status} |"
        for field in msgspec.structs.fields(Limits)
    ]
    ranges = [f"| `{name}` | {allowed} |" for name, allowed in RANGES.items()]
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineArgs)}
    tail = TAIL.format(waiting=defaults["max_waiting"], logprobs=defaults["max_logprobs"])
    return HEAD + "\n".join(rows) + "\n" + RANGES_HEAD + "\n".join(ranges) + "\n" + tail


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
