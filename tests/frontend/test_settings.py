"""Settings in Python: what is harmless is taken, what is none is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineArgs, make_args
from engine.errors import ConfigError
from engine.limits import Limits


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"limits": None}, "limits", Limits()),
        ({"limits": {"prompts": 3}}, "limits", Limits(prompts=3)),
        ({"override_generation_config": None}, "override_generation_config", {}),
        ({"cores": range(2)}, "cores", (0, 1)),
        ({"cores": [1, 3]}, "cores", (1, 3)),
        ({"max_num_seqs": np.int64(4)}, "max_num_seqs", 4),
        ({"memory_fraction": np.float32(0.5)}, "memory_fraction", 0.5),
        ({"memory_fraction": 1}, "memory_fraction", 1),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory", "1GiB"),
        ({"cache_dir": Path("/c")}, "cache_dir", "/c"),
    ],
)
def test_values_that_do_no_harm_are_taken(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(make_args("m", settings), name) == value
    assert make_args(Path("m"), {}) == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"max_seqs": 1}, TypeError, "max_seqs"),
        ({"max_num_seqs": "a"}, ConfigError, "max_num_seqs"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"limits": {"fruits": 1}}, ConfigError, "fruits"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_args("m", settings)
