"""The copy of a cache's index lies in tests/kv_cache."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kv_cache"))
