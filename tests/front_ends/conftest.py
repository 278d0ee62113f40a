"""Fakes of the core and tiny models serve here, too."""

from __future__ import annotations

import sys
from pathlib import Path

ROOMS = ("core", "models", "end_to_end")
sys.path += [str(Path(__file__).parents[1] / room) for room in ROOMS]
