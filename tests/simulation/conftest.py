"""The toy device, its grammars and adapters lie in tests/scheduling, the tiny model in tests/frontend."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("scheduling", "frontend", "kv_cache")]
