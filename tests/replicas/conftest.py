"""Fakes of the core and of ranks serve here, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("core", "executor")]
