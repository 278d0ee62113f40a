"""Random adapters as PEFT saves them, and the model with one merged into its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_families import STATE_FAMILIES
from torch import nn

from engine import LoRARequest

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
BESIDE: dict[str, dict[str, Any]] = {
    "Glm4Moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS},
    "Qwen3_5Moe": {
        **STATE_FAMILIES["Qwen3_5"],
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        **_EXPERTS,
    },
}
"""families with an MLP beside experts, of the last one gated"""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    path: Path,
    model: nn.Module,
    seed: int,
    rank: int = 8,
    targets: Sequence[str] = ALL,
    size: float = 0.2,
    layers: Iterable[int] | None = None,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Of `model`, transformers' own. `targets`: names of modules, or their last parts. Returns what it adds to each
    matrix, by the name of its module."""
    path.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "target_modules": list(targets),
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    alpha = float(settings["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
    generator = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not {name, name.rpartition(".")[2]} & set(targets) or weight is None:
            continue
        if layers is not None and not any(f".{layer}." in name for layer in layers):
            continue
        turned = not isinstance(module, nn.Linear)  # GPT-2's
        outputs, inputs = weight.T.shape if turned else weight.shape
        a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
        b = torch.randn(outputs, rank, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        added[name] = scale * (b @ a).T if turned else scale * (b @ a)
    save_file(tensors, path / "adapter_model.safetensors")
    return added


def merged(model: nn.Module, added: dict[str, torch.Tensor], sign: int = 1) -> None:
    """In place; with `sign` -1 it is taken out again."""
    with torch.no_grad():
        for name, matrix in added.items():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            weight += sign * matrix


def add_experts(path: Path, model: nn.Module, seed: int, rank: int, form: str) -> dict[str, torch.Tensor]:
    """To the adapter in `path`: changes of every expert of `model`. `form`: "apart", a pair for each matrix of each
    expert, as checkpoints name them; "stacked", as PEFT changes parameters, with inputs the last dimension, or
    "turned", the other one. Returns what it adds to each parameter, by its name."""
    config = json.loads((path / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / rank
    if form != "apart":
        config["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
        (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors, added = load_file(path / "adapter_model.safetensors"), {}
    for name, module in model.named_modules():
        if not name.endswith(".experts"):
            continue
        for parameter, behind in (("gate_up_proj", ".base_layer"), ("up_proj", ".base_layer"), ("down_proj", "")):
            whole = getattr(module, parameter, None)
            if not isinstance(whole, torch.Tensor):
                continue
            count, *sizes = whole.shape
            inputs, outputs = sizes if form == "turned" else sizes[::-1]
            a = torch.randn(count, rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(count, outputs, rank, generator=generator) * 0.3
            change = scale * (b @ a)
            added[f"{name}.{parameter}"] = change.mT if form == "turned" else change
            start = f"base_model.model.{name}"
            if form == "apart":
                for expert in range(count):
                    parts = zip(("gate_proj", "up_proj"), b[expert].chunk(2), strict=True)
                    own = dict(parts) if parameter == "gate_up_proj" else {parameter: b[expert]}
                    for matrix, of_matrix in own.items():
                        key = f"{start}.{expert}.{matrix}.lora_"
                        tensors |= {f"{key}A.weight": a[expert].clone(), f"{key}B.weight": of_matrix.clone()}
            else:
                key = f"{start}{behind}.lora_"
                tensors[f"{key}A.weight"] = a.flatten(0, 1)
                tensors[f"{key}B.weight"] = b.permute(1, 2, 0).flatten(1).contiguous()
    save_file(tensors, path / "adapter_model.safetensors")
    return added


def merged_experts(model: nn.Module, added: dict[str, torch.Tensor], sign: int = 1) -> None:
    """See `merged`."""
    with torch.no_grad():
        for name, change in added.items():
            model.get_parameter(name).add_(sign * change)


def request(path: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(path.name, number, str(path))
