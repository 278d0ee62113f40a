"""Fakes of the core and of ranks serve here, too, and what compares ranks with one process."""

from __future__ import annotations

import sys
from pathlib import Path

ROOMS = ("core", "executor", "parallel", "models", "cpu_kernels", "end_to_end")
sys.path += [str(Path(__file__).parents[1] / room) for room in ROOMS]
