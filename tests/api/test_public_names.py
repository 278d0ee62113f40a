"""`import engine` is quick, and its names are the documented ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

import engine


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, engine; print([m for m in ('torch', 'transformers', 'msgspec', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_public_name_resolves_and_others_do_not() -> None:
    assert [getattr(engine, name).__name__ for name in engine.__all__] == engine.__all__
    for name in ("PromptType", "PoolingRequestOutput", "EmbeddingRequestOutput", "ScoringRequestOutput"):
        assert getattr(engine, name) is not None  # types without a name of their own
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = engine.Nonsense


def test_the_front_end_needs_no_torch() -> None:
    """The server's own process stays small; the core's process brings torch."""
    code = "import sys, engine.async_engine, engine.llm; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
