"""What bitsandbytes and torchao wrote is read as they read it. (Neither is a dependency: what is not installed is
skipped.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from library_forms import torchao
from stored_forms import write

from engine.models.quantization import stored_format
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource


def read(folder: Path, config: dict[str, Any], name: str, shape: torch.Size) -> torch.Tensor:
    stored = stored_format({"quantization_config": config})
    assert stored is not None
    with QuantizedSource(SafetensorsSource(folder), stored) as source:
        assert source.shapes()[name] == tuple(shape)
        values = torch.empty(shape)
        source.read_into(name, values)
    return values


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes(kind: str, nested: bool, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(1)
    for index in range(100):
        weight = torch.randn(8 + index, 64 * (1 + index % 3), generator=generator) * 0.1
        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {f"a.weight.{part}": each for part, each in state.as_dict(packed=True).items()}
        write(tmp_path, {"a.weight": codes, **parts})
        values = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "a.weight", weight.shape)
        torch.testing.assert_close(values, functional.dequantize_4bit(codes, state), rtol=1e-6, atol=0)


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(2)
    for index in range(100):
        weight = (torch.randn(8 + index, 64 * (1 + index % 3), generator=generator) * 0.1).half()
        levels, largest, _ = functional.int8_vectorwise_quant(weight)
        write(tmp_path, {"a.weight": levels, "a.SCB": largest})
        values = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "a.weight", weight.shape)
        torch.testing.assert_close(values, functional.int8_vectorwise_dequant(levels, largest), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weights_of_torchao(kind: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    options = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)} if "Intx" in kind else {}
    torch.manual_seed(3)
    for index in range(100):
        layer = torch.nn.Linear(64 * (1 + index % 3), 8 + index, bias=False).bfloat16()
        model = torch.nn.ModuleDict({"a": layer})
        quantization.quantize_(model, getattr(quantization, kind)(**options))
        tensors, _ = support.flatten_tensor_state_dict(model.state_dict())
        write(tmp_path, tensors)
        values = read(tmp_path, torchao(kind), "a.weight", layer.weight.shape)
        assert torch.equal(values.bfloat16(), layer.weight.dequantize().bfloat16())
