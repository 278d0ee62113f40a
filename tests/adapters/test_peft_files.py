"""Adapters come from anywhere: what is served of PEFT's format, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import request, save_adapter
from tiny_families import save_tiny

from engine.adapters.config import LoRAConfig
from engine.adapters.peft import check_files
from engine.adapters.targets import Targets
from engine.errors import InvalidRequestError
from engine.models.description import describe
from engine.models.spec import DecoderSpec

CONFIG = LoRAConfig(max_lora_rank=16, max_loras=1, max_cpu_loras=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, DecoderSpec]:
    path = tmp_path_factory.mktemp("model")
    module = save_tiny("Llama", path)
    spec = describe(str(path)).spec
    assert spec is not None
    return module, spec


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"rank": 32}, "rank 32; 1 to 16 are served"),
        ({"targets": ["embed_tokens"]}, "embed_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    model: tuple[torch.nn.Module, DecoderSpec], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    module, spec = model
    save_adapter(tmp_path, module, 0, **config)
    with pytest.raises(InvalidRequestError, match=said):
        check_files(request(tmp_path), spec, CONFIG)


def test_damaged_directories_are_refused(model: tuple[torch.nn.Module, DecoderSpec], tmp_path: Path) -> None:
    module, spec = model
    adapter, weights = request(tmp_path), tmp_path / "adapter_model.safetensors"

    def refused(said: str) -> None:
        with pytest.raises(InvalidRequestError, match=said):
            check_files(adapter, spec, CONFIG)

    refused("no adapter_config.json")
    with pytest.raises(InvalidRequestError, match="lora_path cannot be read"):
        check_files(request(tmp_path / ("long" * 100)), spec, CONFIG)
    save_adapter(tmp_path, module, 0)
    check_files(adapter, spec, CONFIG)
    tensors = load_file(weights)
    name = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    save_file({**tensors, f"{name}B.weight": torch.zeros(7, 8)}, weights)
    refused(r"k_proj.lora_B.weight has shape \(7, 8\), expected \(32, 8\)")
    save_file({key: value for key, value in tensors.items() if key != f"{name}A.weight"}, weights)
    refused("has lora_B alone")
    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(1)}, weights)
    refused("no lora_A or lora_B")
    again = {key.replace("base_model.model.model", "model"): tensor.clone() for key, tensor in tensors.items()}
    save_file({**tensors, **again}, weights)
    refused("has lora_. twice")
    again = {key.replace("base_model.model.model.", ""): tensor.clone() for key, tensor in tensors.items()}
    save_file({**tensors, **again}, weights)
    refused("adapted twice")
    save_file({f"{name}A.weight": torch.zeros(16, 1 << 20)}, weights)
    refused("more than .*, which the largest ranks have at most")
    weights.write_bytes(weights.read_bytes()[:100])
    refused("damaged")
    weights.unlink()
    refused("no adapter_model.safetensors")
    header = b'{"odd":{"dtype":"F32","shape":[9223372036854775808,0],"data_offsets":[0,0]}}'
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    refused("cannot be read")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 10**400}))
    refused("lora_alpha must be a number")
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    refused("not an object")


def test_modules_of_a_model_inside_another_have_the_names_of_every_release(tmp_path: Path) -> None:
    """Of Gemma 3 that sees: as PEFT saves them with transformers of 2024, of 2025 and of today."""
    save_tiny("Gemma3", tmp_path)
    spec = describe(str(tmp_path)).spec
    assert spec is not None
    targets = Targets(spec, CONFIG)
    part = targets.find("model.layers.1.mlp.down_proj")
    assert part is not None
    for before in ("language_model.model.", "model.language_model."):
        assert targets.find(f"{before}layers.1.mlp.down_proj") == part
