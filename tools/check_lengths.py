"""House rule, checked in CI: files of at most 400 lines, functions of at most 60 (other languages than Python: files
only). What others wrote (`vendor`) is as long as it is."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE = 400
MAX_FUNCTION = 60
ROOMS = ("engine", "compilation", "attention_backends", "entrypoints", "tools", "tests")
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".js", ".css"}


def findings(path: Path) -> list[str]:
    text = path.read_text()
    found = []
    lines = text.count("\n")
    if lines > MAX_FILE:
        found.append(f"{path}: {lines} lines (limit {MAX_FILE})")
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > MAX_FUNCTION:
                    found.append(f"{path}:{node.lineno}: {node.name} has {size} lines (limit {MAX_FUNCTION})")
    return found


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    files = [p for room in ROOMS for p in sorted((root / room).rglob("*"))]
    paths = [p for p in files if p.suffix in SUFFIXES and "vendor" not in p.parts]
    found = [line for p in paths for line in findings(p)]
    print(
        "\n".join(found)
        if found
        else f"{len(paths)} files: none over {MAX_FILE} lines, no function over {MAX_FUNCTION}"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
