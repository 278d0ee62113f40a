"""What compressed-tensors' own compressors wrote is read as its own decompressors read it, bit for bit. (The library is
no dependency: these tests are skipped where it is not installed.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stored_forms import write
from torch import Tensor

from engine.cpu_kernels.quantize import pack_blocks, unpack
from engine.models.quantization import stored_format
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4_group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "int4_group_zero": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
    "int4_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int4_channel_zero": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "int8_group": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 128}),
    "int8_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "int8_tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    "int8_channel_zero": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "float8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float8_channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
}


def _scales(options: dict[str, Any], n: int, k: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    shape = {
        "tensor": (1,),
        "channel": (n, 1),
        "group": (n, k // options.get("group_size", k)),
        "tensor_group": (n, k // options.get("group_size", k)),
        "block": (-(-n // 128), -(-k // 128)),
    }[options["strategy"]]
    return (torch.rand(shape, generator=generator) * 0.02 + 0.005).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", SCHEMES)
def test_read_as_the_library_reads_it(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    format, options = SCHEMES[name]
    weights = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)
    generator = torch.Generator().manual_seed(2)
    tensors, expected = {}, {}
    for index in range(100):
        n, k = 8 * int(torch.randint(2, 24, (), generator=generator)), 128 * (1 + index % 3)
        state = {"weight": (torch.randn(n, k, generator=generator) * 0.1).to(dtype)}
        state["weight_scale"] = _scales(options, n, k, generator, dtype)
        if format.startswith("nvfp4"):
            state["weight_global_scale"] = torch.tensor([4321.0])
            state["weight_scale"] = (state["weight_scale"].float() * 4000).to(torch.float8_e4m3fn).to(dtype)
        if not weights.symmetric:
            bits = weights.num_bits - 1
            shape = state["weight_scale"].shape
            state["weight_zero_point"] = torch.randint(-(2**bits), 2**bits, shape, generator=generator).to(torch.int8)
        stored = compressor.compress(state, scheme)
        expected[f"{index}.weight"] = compressor.decompress(stored, scheme)["weight"]
        tensors |= {f"{index}.{part}": tensor.detach().clone() for part, tensor in stored.items()}
    write(tmp_path, tensors)
    groups = {"group_0": scheme}
    config = QuantizationConfig(config_groups=groups, format=format, quantization_status="compressed")
    stored_as = stored_format({"quantization_config": config.model_dump(mode="json")})
    assert stored_as is not None
    with QuantizedSource(SafetensorsSource(tmp_path), stored_as) as source:
        assert set(source.shapes()) == set(expected)
        for name, values in expected.items():
            read = torch.empty_like(values)
            source.read_into(name, read)
            assert torch.equal(read, values), name
            found = source.encoded(name)
            if found is not None and dtype is not torch.float32:  # those scales become float16
                exact = unpack(pack_blocks(found.rows, found.format), *values.shape, found.format)
                assert torch.equal(exact.to(values.dtype), values)
