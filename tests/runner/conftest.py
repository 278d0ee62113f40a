"""The device that captures into an arena lies in tests/compilation."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "compilation"))
