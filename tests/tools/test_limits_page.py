"""The page of limits says what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_limits_is_written_from_the_code() -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "tools/write_limits.py"), "--check"], cwd=ROOT)
    assert checked.returncode == 0, "run tools/write_limits.py"
