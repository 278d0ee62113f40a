"""transformers' model of a GGUF file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def model_by_transformers(file: Path) -> PreTrainedModel:
    """In float32, as `from_pretrained(gguf_file=...)` would load it, but without the accelerate package. The file is
    read once, not once for the config and once for the tensors, and gguf's table of names is made once, not once for
    each module: most of the time went there."""
    mapped = np.memmap

    def as_array(*args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return np.asarray(mapped(*args, **kwargs))

    with (
        mock.patch("numpy.memmap", as_array),  # gguf's reader takes a million views of it
        mock.patch("gguf.GGUFReader", cache(gguf.GGUFReader)),
        mock.patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict({name: torch.as_tensor(value) for name, value in tensors.items()}, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model
