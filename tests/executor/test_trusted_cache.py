"""Native libraries come only from where nobody else may write."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_fakes import tiny_config
from msgspec.structs import replace

from engine.core.start import DEFAULT_EXECUTOR, load_executor
from engine.errors import ConfigError


@pytest.mark.parametrize("folder", [".", "attention-cpu", "linear-cpu", "sampling-cpu", "attention-cuda"])
def test_a_start_refuses_a_cache_that_others_may_write_before_it_builds_or_loads(tmp_path: Path, folder: str) -> None:
    """Whoever puts a library of the right name there would run code as this user."""
    cache = tmp_path / "cache"
    (cache / folder).mkdir(parents=True, mode=0o755)
    config = tiny_config()
    config = replace(config, compile=replace(config.compile, cache_dir=str(cache)))
    (cache / folder).chmod(0o777)
    with pytest.raises(ConfigError, match=r"writable by others.*--cache-dir"):
        load_executor(DEFAULT_EXECUTOR, config)
    assert sum(1 for path in cache.rglob("*") if path.is_file()) == 0
