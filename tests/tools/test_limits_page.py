"""Pages say what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["write_limits.py", "write_vllm_names.py"])
def test_a_page_is_written_from_the_code(program: str) -> None:
    checked = subprocess.run([sys.executable, str(ROOT / "tools" / program), "--check"], cwd=ROOT)
    assert checked.returncode == 0, f"run tools/{program}"
