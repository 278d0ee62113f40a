"""The tiny models and the dense attention of the models' own tests, and the kernels' random blocks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("models", "cpu_kernels", "end_to_end")]
sys.path.append(str(Path(__file__).parents[2] / "tools"))
