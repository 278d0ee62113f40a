"""Checkpoints of which a part is left unquantised, or whose scales have another type: every quantisation loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from stored_forms import FORMS, Form, Made, quantized_llama, write

from attention_backends.toolchain import default_cache_dir
from engine.config import Quantization
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, load, unpack
from engine.errors import WeightsError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.packed import JoinedLinear, PackedLinear
from engine.weights.loader import load_weights
from engine.weights.packing import Packer
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource

_V = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def ops() -> LinearOps:
    return load(default_cache_dir())


def changed(folder: Path, change: dict[str, torch.Tensor]) -> None:
    write(folder, {**load_file(folder / "model.safetensors"), **change})


def packed(folder: Path, ops: LinearOps, quantization: Quantization) -> Decoder:
    description = describe(str(folder))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=Packer(ops, quantization))
    return model


@pytest.mark.parametrize(
    ("form", "quantization", "format", "error"),
    [
        ("float8_channel", "fp8", Format.FLOAT8, 2**-4),
        ("float8_channel", "int4", Format.Q4_1, 2**-4),
        ("float8_channel", "stored", Format.BFLOAT16, 2**-8),
    ],
)
def test_a_part_that_is_left_dense_is_quantised_beside_those_that_are_not(
    form: str, quantization: Quantization, format: Format, error: float, tmp_path: Path, ops: LinearOps
) -> None:
    model = quantized_llama(FORMS[form], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = model.get_parameter(_V).detach().bfloat16()
    del tensors[f"{_V}_scale"]
    write(tmp_path, {**tensors, _V: values})
    joined = packed(tmp_path, ops, quantization).layers[0].qkv_proj
    parts = joined.parts if isinstance(joined, JoinedLinear) else [joined]
    last = parts[-1]
    assert isinstance(last, PackedLinear) and last.format == format
    decoded = torch.cat([_decoded(part) for part in parts])
    wanted = torch.cat([model.get_parameter(_V.replace("v_proj", f"{which}_proj")) for which in "qkv"])
    assert decoded.shape == wanted.shape
    assert (decoded - wanted).abs().max() <= error * wanted.abs().max()


def _decoded(layer: PackedLinear) -> torch.Tensor:
    return unpack(layer.weight, layer.n, layer.k, Format(layer.format))


def exponents(dtype: torch.dtype) -> Form:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
        bits = torch.randint(115, 120, (-(-n // 128), -(-k // 128)), generator=generator).to(torch.uint8)
        powers = 2.0 ** (bits.double() - 127)
        by_weight = powers.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return {"weight": weight, "weight_scale_inv": bits.view(dtype)}, weight.double() * by_weight

    return Form({"quant_method": "fp8", "weight_block_size": [128, 128]}, make, Format.FLOAT8_BLOCK)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_bytes_are_exponents(dtype: torch.dtype, tmp_path: Path, ops: LinearOps) -> None:
    model = quantized_llama(exponents(dtype), tmp_path)
    stored = describe(str(tmp_path)).quantized
    assert stored is not None
    with QuantizedSource(SafetensorsSource(str(tmp_path)), stored) as source:
        found = torch.empty(model.get_parameter(_V).shape)
        source.read_into(_V, found)
    assert torch.equal(found, model.get_parameter(_V))
    layer = packed(tmp_path, ops, "stored").layers[0].down_proj
    assert isinstance(layer, PackedLinear) and layer.format == Format.FLOAT8_BLOCK
    assert torch.equal(_decoded(layer), model.get_parameter("model.layers.0.mlp.down_proj.weight"))


def test_an_exponent_that_is_no_number_is_refused(tmp_path: Path, ops: LinearOps) -> None:
    quantized_llama(exponents(torch.uint8), tmp_path)
    scale = f"{_V}_scale_inv"
    changed(tmp_path, {scale: torch.full_like(load_file(tmp_path / "model.safetensors")[scale], 255)})
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor model.layers.0.self_attn.v_proj.*255"):
        packed(tmp_path, ops, "stored")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["lm_head.weight", _V])
def test_what_cannot_be_quantised_is_told_with_its_name(
    name: str, quantization: Quantization, tmp_path: Path, ops: LinearOps
) -> None:
    quantized_llama(FORMS["float8_channel"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(f"{_V}_scale")
    tensors[_V] = tensors[_V].bfloat16()
    tensors[name][3] = float("nan")
    write(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor .*a weight is not finite"):
        packed(tmp_path, ops, quantization)
