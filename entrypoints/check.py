"""`engine-serve --check MODEL`: what it needs and whether this machine has it, before anything large is fetched."""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from entrypoints.options import engine_args
from entrypoints.sources import told


def check(options: argparse.Namespace) -> int:
    """Prints the plan (`--json`: for machines). The exit status: 0 where it fits, else 1."""
    from engine.errors import EngineError
    from engine.plan import plan_of
    from entrypoints.server.before_start import check_options

    try:
        check_options(options)
        plan = plan_of(engine_args(options, options.model))
    except EngineError as error:
        problem = told(error, options)
        if options.json:
            _print(msgspec.json.encode({"fits": False, "problems": [problem]}).decode())
        print(f"engine-serve: {problem}", file=sys.stderr)
        return 1
    _print(msgspec.json.encode(plan).decode() if options.json else plan.text())
    return 0 if plan.fits else 1


def _print(text: str) -> None:
    """Whoever reads it may have read enough."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's end tries again
