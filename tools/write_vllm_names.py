"""Writes the last part of docs/vllm.md, vLLM's settings, from `engine.vllm_names`.
usage: python tools/write_vllm_names.py [--check]"""

from __future__ import annotations

import sys
from pathlib import Path

from engine.vllm_names import INSTEAD, RENAMED, SHORT, VALUES, VLLMS_NAMES, WITHOUT_EFFECT

PAGE = Path(__file__).resolve().parents[1] / "docs" / "vllm.md"
HEAD = """## Settings under vLLM's names

Written by `tools/write_vllm_names.py` from `engine/vllm_names.py`; do not edit it here. In Python with underscores, on
the command line with dashes (or underscores). Those that have the same name here are in `engine-serve --help`.

| vLLM's | here |
|---|---|
"""


def page() -> str:
    kept = PAGE.read_text(encoding="utf-8").partition(HEAD.splitlines()[0])[0].rstrip() + "\n\n"
    short = [f"| `{flag}` | `--{name.replace('_', '-')}` |" for name, flag in SHORT.items()]
    values = [
        f"| `{name}={theirs!r}` | `{name}={ours!r}` |"
        for name, found in VALUES.items()
        for theirs, ours in found.items()
    ]
    return kept + HEAD + "\n".join([*short, *(f"| `{name}` | {_here(name)} |" for name in VLLMS_NAMES), *values]) + "\n"


def _here(name: str) -> str:
    if name in RENAMED:
        return f"`{RENAMED[name]}`"
    refused = f"refused: {INSTEAD[name]}" if name in INSTEAD else ""
    if name == "enforce_eager":
        return "`compile='none'`"
    if name not in WITHOUT_EFFECT:
        return refused
    values = " or ".join(f"`{value!r}`" for value in WITHOUT_EFFECT[name])
    if not values:
        return "no effect"
    return f"no effect as {values}; else {refused}"


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
