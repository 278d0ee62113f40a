"""What weights take, told from a description, is what a loaded model's weights take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from gguf_models import write_gguf
from stored_forms import FORMS, quantized_llama
from tiny_models import CASES, make_model

from engine.config import EngineArgs
from engine.cpu_kernels.formats import Format, device_bytes, device_packable
from engine.models.decoder import Decoder
from engine.models.description import ModelDescription, describe
from engine.models.gguf_header import read_gguf_header
from engine.resolve import resolve_here
from engine.runner.loading import load_parts
from engine.weights.device_packing import DevicePacker
from engine.weights.loader import load_weights
from engine.weights.sizes import gguf_weight_bytes, stored_weight_bytes, weight_bytes


def loaded_bytes(path: str, native_cache: Path, **settings: str) -> tuple[int, str]:
    args = EngineArgs(model=path, device="cpu", cache_dir=str(native_cache), **settings)  # type: ignore[arg-type]
    config = resolve_here(args)[1]
    return load_parts(config).weight_bytes, config.model.quantization


KINDS = ("none", "int8", "int4", "fp8", "float32")
SIZED = (*CASES, "deepseek_v2", "deepseek_v3", "falcon_h1", "kimi_linear", "nemotron_h_experts")


def sized() -> list[Any]:
    """Of each model two kinds by default, another two of the next one."""
    grid = [(index, case, place, kind) for index, case in enumerate(SIZED) for place, kind in enumerate(KINDS)]
    return [
        pytest.param(case, kind, marks=() if (place - 2 * index) % 5 < 2 else pytest.mark.exhaustive)
        for index, case, place, kind in grid
    ]


@pytest.mark.parametrize(("case", "quantization"), sized())
def test_of_a_checkpoint(case: str, quantization: str, tmp_path: Path, native_cache: Path) -> None:
    make_model(case).save_pretrained(tmp_path)
    settings = {"dtype": "float32"} if quantization == "float32" else {"quantization": quantization}
    loaded, kind = loaded_bytes(str(tmp_path), native_cache, **settings)
    spec = resolve_here(EngineArgs(model=str(tmp_path), device="cpu"))[0].spec
    dense = quantization == "float32"
    told = weight_bytes(spec, 4 if dense else 2, kind, None if dense else "cpu")  # type: ignore[arg-type]
    assert told == loaded


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", ["llama", "qwen3_moe", "gemma3_windows", "gpt2"])
def test_of_a_checkpoint_on_a_gpu(case: str, quantization: str, tmp_path: Path) -> None:
    make_model(case).save_pretrained(tmp_path)
    description = describe(str(tmp_path))
    assert device_loaded_bytes(description, quantization) == weight_bytes(description.spec, 2, quantization, "gpu")


@pytest.mark.parametrize("encoding", ["F16", "Q4_1", "Q8_0", "Q5_0", "MXFP4"])
def test_of_a_gguf_file_on_a_gpu(encoding: str, tmp_path: Path) -> None:
    path = write_gguf(make_model("llama"), tmp_path / "tiny.gguf", GGMLQuantizationType[encoding])
    description = describe(path)
    told = gguf_weight_bytes(read_gguf_header(path).tensors, description.spec, "gpu")
    assert device_loaded_bytes(description, "gguf") == told


@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_blocks", "fp8_e5m2", "nvfp4", "mxfp4", "gptq_symmetric"])
def test_of_a_quantised_checkpoint_on_a_gpu(form: str, tmp_path: Path) -> None:
    quantized_llama(FORMS[form], tmp_path)
    description = describe(str(tmp_path))
    assert description.quantized is not None
    told = stored_weight_bytes(str(tmp_path), description.quantized, description.spec, "gpu")
    assert device_loaded_bytes(description, "stored") == told


def device_loaded_bytes(description: ModelDescription, quantization: str) -> int:
    """What a GPU would hold, packed in the CPU's memory."""
    packer = DevicePacker(quantization, torch.bfloat16, torch.device("cpu"))  # type: ignore[arg-type]
    return load_weights(Decoder(description.spec, dtype=torch.bfloat16), description, packer=packer)


@pytest.mark.parametrize("encoding", ["F32", "F16", "Q4_0", "Q8_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize(
    "case", ["llama", "gemma3_windows", "gemma4_layer_inputs", "phi3_long_rope", "olmo2", "glm4", "starcoder2"]
)
def test_of_a_gguf_file(case: str, encoding: str, tmp_path: Path, native_cache: Path) -> None:
    path = write_gguf(make_model(case), tmp_path / "tiny.gguf", GGMLQuantizationType[encoding])
    loaded, kind = loaded_bytes(path, native_cache)
    assert kind == "gguf" and gguf_weight_bytes(read_gguf_header(path).tensors, describe(path).spec) == loaded


def test_a_gpu_packs_what_lies_in_whole_groups() -> None:
    assert device_packable(3, 17, Format.BFLOAT16) and device_packable(3, 64, Format.INT8)
    assert not device_packable(3, 48, Format.INT8) and not device_packable(3, 128, Format.Q4_K)
    for format in Format:
        if device_packable(40, 512, format):
            assert device_bytes(40, 512, format) > 0
