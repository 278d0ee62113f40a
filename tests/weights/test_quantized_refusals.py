"""What is not read is refused by its name, and files that lie by the names of tensor and file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library_forms import LIBRARY_FORMS, torchao
from stored_forms import FORMS, LLAMA, quantized_llama, write
from torch import Tensor

from engine.errors import ConfigError, UnsupportedModelError, WeightsError
from engine.models.description import describe
from engine.models.quantization import stored_format
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource

_ALL = FORMS | LIBRARY_FORMS
_GPTQ = FORMS["gptq"].config
_COMPRESSED = FORMS["packed"].config


def _scheme(**weights: object) -> dict[str, Any]:
    return {**_COMPRESSED, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "torchao"}, "torchao: quant_type=None.*Int8WeightOnlyConfig"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type='int4_weight_only'"),
        (torchao("UIntXWeightOnlyConfig"), "quant_type='UIntXWeightOnlyConfig'.*Int4WeightOnlyConfig are"),
        (torchao("FqnToConfig", fqn_to_config={"a": torchao("X")["quant_type"]["default"]}), "quant_type='X'"),
        (torchao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"), "tile_packed_to_4d.*plain is"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt.*convert"),
        ({"quant_method": "hqq"}, "hqq.*supported are"),
        ({"quant_method": ["gptq"]}, "supported are"),
        ({"bits": 4}, "None.*supported are"),
        ({**_GPTQ, "bits": 3}, "gptq: bits=3.*4 and 8"),
        ({**_GPTQ, "bits": {"a": 4}}, "bits"),
        ({**_GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'.*gptq_v2"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq: version='gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "awq: bits=8"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "itrex"}, "auto-round: packing_format='itrex'"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type='mx_fp'"),
        ({"quant_method": "auto-round", "bits": 2}, "auto-round: bits=2"),
        ({**_COMPRESSED, "format": "marlin-24"}, "format='marlin-24'.*pack-quantized"),
        ({**_COMPRESSED, "format": "mxfp8-quantized"}, "mxfp8-quantized"),
        ({**_COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**_COMPRESSED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        (_scheme(num_bits=3, type="int"), "3 bits"),
        (_scheme(num_bits=4, type=["int"]), "4 bits"),
        (_scheme(num_bits=4, type="int", strategy="token"), "strategy='token'.*channel"),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_what_is(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    quantized_llama(FORMS["gptq"], tmp_path)
    write(tmp_path, {"x": torch.zeros(1)}, {**LLAMA.to_dict(), "quantization_config": config})
    with pytest.raises(UnsupportedModelError, match=says) as refusal:
        describe(str(tmp_path))
    assert str(refusal.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("gptq", "quantization_config must be an object"),
        ({**_GPTQ, "group_size": 0}, "group_size"),
        ({**_GPTQ, "group_size": 2**40}, "group_size"),
        ({**_GPTQ, "group_size": "128"}, "group_size"),
        ({**_GPTQ, "sym": "yes"}, "sym"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**_COMPRESSED, "config_groups": [1]}, "config_groups"),
        ({**_COMPRESSED, "config_groups": {"a": 1}}, "config_groups"),
    ],
)
def test_a_malformed_config_is_refused_naming_the_key(config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stored_format({"quantization_config": config})


def test_older_checkpoints_say_it_under_another_key() -> None:
    found = stored_format(
        {"compression_config": {key: _COMPRESSED[key] for key in _COMPRESSED if key != "quant_method"}}
    )
    assert found is not None and found.layout == "compressed-tensors"
    assert stored_format({}) is None and stored_format({"quantization_config": None}) is None


def test_the_transformers_librarys_module_reads_none(tmp_path: Path) -> None:
    quantized_llama(FORMS["gptq"], tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"transformers.*gptq"):
        describe(str(tmp_path), "transformers")


def _without(part: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[part]

    return change


def _instead(part: str, made: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[part] = made(tensors[part])

    return change


_SHAPES = [
    ("gptq", _without("scales"), "scales is missing"),
    ("gptq", _without("qzeros"), "qzeros is missing"),
    ("gptq", _instead("scales", lambda x: x[:-1]), "scales|qzeros"),
    ("gptq", _instead("scales", lambda x: x[:, :-1]), "scales"),
    ("gptq", _instead("scales", lambda x: x.to(torch.int32)), "scales is stored as I32"),
    ("gptq", _instead("qzeros", lambda x: x[:, :-1]), "qzeros"),
    ("gptq", _instead("qzeros", lambda x: x[:, :0]), "qzeros"),
    ("gptq", _instead("qweight", lambda x: x[0]), "qweight has shape.*2 dimensions"),
    ("gptq", _instead("qweight", lambda x: x.float()), "qweight is stored as F32"),
    ("gptq", _instead("qweight", lambda x: x[:-1]), "scales|g_idx"),
    ("int8", _instead("weight", lambda x: x[:, :0]), "not empty"),
    ("gptq", _instead("g_idx", lambda x: x[:-1]), "g_idx has shape"),
    ("awq", _without("qzeros"), "qzeros is missing"),
    ("awq", _instead("qzeros", lambda x: x[:, :-1]), "qzeros has shape"),
    ("awq", _instead("qweight", lambda x: x[:, :-1]), "qweight has shape"),
    ("awq", _instead("scales", lambda x: x[:-1]), "qzeros|scales"),
    ("packed", _without("weight_scale"), "weight_scale is missing"),
    ("packed", _without("weight_shape"), "weight_shape is missing"),
    ("packed", _instead("weight_shape", lambda x: x + 1), "weight_packed.*weight_shape"),
    ("packed", _instead("weight_shape", lambda x: -x), "weight_packed.*weight_shape"),
    ("packed", _instead("weight_shape", lambda x: x.repeat(40)), "weight_shape has shape"),
    ("packed", _instead("weight_scale", lambda x: x[:-1]), "weight_scale has shape"),
    ("packed", _instead("weight_scale", lambda x: x[:, :-1]), "weight_scale has shape.*groups"),
    ("packed_asymmetric", _instead("weight_zero_point", lambda x: x[:-1]), "weight_zero_point has shape"),
    ("int8", _without("weight_scale"), "weight_scale is missing"),
    ("int8_asymmetric", _instead("weight_zero_point", lambda x: x[:-1]), "weight_zero_point has shape"),
    ("fp8_blocks", _without("weight_scale_inv"), "weight_scale is missing"),
    ("fp8_blocks", _instead("weight_scale_inv", lambda x: x.repeat(2, 2)), "weight_scale_inv has shape"),
    ("nvfp4", _instead("weight_global_scale", lambda x: x.repeat(2)), "weight_global_scale has shape"),
    ("nvfp4", _instead("weight_scale", lambda x: x[:, :-1]), "weight_scale has shape"),
    ("mxfp4", _instead("weight_scale", lambda x: x.float()), "weight_scale is stored as F32"),
    ("bnb_nf4", _without("weight.absmax"), "absmax is missing"),
    ("bnb_nf4", _without("weight.quant_map"), "quant_map is missing"),
    ("bnb_nf4", _without("weight.quant_state.bitsandbytes__nf4"), "its quant_state is missing"),
    ("bnb_nf4", _instead("weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1]), "is no state"),
    ("bnb_nf4", _instead("weight.quant_state.bitsandbytes__nf4", lambda x: x.repeat(9)), "quant_state"),
    ("bnb_nf4", _instead("weight", lambda x: x[:-1]), "weight has shape.*64 × 256"),
    ("bnb_nf4", _instead("weight.absmax", lambda x: x[:-1]), "absmax has shape"),
    ("bnb_nf4_nested", _instead("weight.absmax", lambda x: x.float()), "absmax is stored as F32"),
    ("bnb_nf4_nested", _without("weight.nested_absmax"), "nested_absmax is missing"),
    ("bnb_int8", _without("SCB"), "SCB is missing"),
    ("bnb_int8", _instead("SCB", lambda x: x[:-1]), "SCB has shape"),
    ("torchao_int8", _without("_weight_scale"), "_weight_scale is missing"),
    ("torchao_int8", _instead("_weight_scale", lambda x: x.view(-1, 1)[:, :0]), "_weight_scale has shape.*groups"),
    ("torchao_int8", _instead("_weight_scale", lambda x: x.view(-1, 1).repeat(1, 3)), "_weight_scale has.*groups"),
    ("torchao_int8_by_name", _instead("_weight_zero_point", lambda x: x[:-1]), "_weight_zero_point has shape"),
    ("torchao_int4", _instead("_weight_scale", lambda x: x[:, :-1]), "_weight_scale has shape"),
    ("torchao_int4", _instead("_weight_scale", lambda x: x[:3]), "_weight_scale has shape.*groups"),
]


@pytest.mark.parametrize(("form", "change", "says"), _SHAPES)
def test_tensors_that_do_not_fit_are_refused_before_they_are_read(
    form: str, change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    tensors, _ = _ALL[form].make(64, 256, torch.Generator().manual_seed(0))
    change(tensors)
    write(tmp_path, {f"layer.{part}": tensor for part, tensor in tensors.items()})
    stored = stored_format({"quantization_config": _ALL[form].config})
    assert stored is not None
    with pytest.raises(WeightsError, match=says) as refusal:
        QuantizedSource(SafetensorsSource(tmp_path), stored)
    assert "model.safetensors: tensor layer." in str(refusal.value)


@pytest.mark.parametrize(("form", "name"), [("gptq", "qweight"), ("packed", "weight_packed"), ("awq", "qweight")])
def test_a_matrix_of_no_module_is_refused_as_any_other(form: str, name: str, tmp_path: Path) -> None:
    quantized_llama(FORMS[form], tmp_path)
    write(tmp_path, {name: torch.zeros(4, 4, dtype=torch.int32)})
    stored = stored_format({"quantization_config": FORMS[form].config})
    assert stored is not None
    with pytest.raises(WeightsError, match=r"model\.safetensors: tensor \.\w+ is missing"):
        QuantizedSource(SafetensorsSource(tmp_path), stored)


_VALUES = [
    ("gptq", _instead("g_idx", lambda x: x + 7), "g_idx names groups"),
    ("gptq", _instead("g_idx", lambda x: x - 5), "g_idx names groups"),
    ("gptq", _instead("scales", lambda x: x * float("inf")), "scales holds scales that are not finite"),
    ("packed", _instead("weight_scale", lambda x: x * float("nan")), "weight_scale holds scales"),
    ("int8_asymmetric", _instead("weight_zero_point", lambda x: x.to(torch.int32) + 1000), "zero points"),
    ("fp8_blocks", _instead("weight_scale_inv", lambda x: x * float("nan")), "weight_scale_inv holds scales"),
    ("nvfp4", _instead("weight_global_scale", lambda x: x * float("inf")), "weight_global_scale holds"),
    ("nvfp4", _instead("weight_global_scale", lambda x: x * 0), "weight_global_scale holds"),
    ("mxfp4", _instead("weight_scale", lambda x: x | 255), "weight_scale holds 255"),
    ("bnb_nf4", _instead("weight.absmax", lambda x: x * float("nan")), "absmax holds scales"),
    ("bnb_int8", _instead("SCB", lambda x: x * float("inf")), "SCB holds scales"),
    ("torchao_int4", _instead("_weight_zero_point", lambda x: x * float("inf")), "_weight_zero_point holds"),
]


@pytest.mark.parametrize(("form", "change", "says"), _VALUES)
def test_values_that_mean_nothing_are_refused_when_they_are_read(
    form: str, change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path
) -> None:
    tensors, _ = _ALL[form].make(64, 256, torch.Generator().manual_seed(0))
    change(tensors)
    write(tmp_path, {f"layer.{part}": tensor for part, tensor in tensors.items()})
    stored = stored_format({"quantization_config": _ALL[form].config})
    assert stored is not None
    with QuantizedSource(SafetensorsSource(tmp_path), stored) as source:
        with pytest.raises(WeightsError, match=says) as refusal:
            source.read_into("layer.weight", torch.empty(64, 256))
        if form not in ("fp8_blocks", "nvfp4", "bnb_nf4", "torchao_int4"):
            with pytest.raises(WeightsError, match=says):
                source.encoded("layer.weight")
    assert "model.safetensors: tensor layer." in str(refusal.value)


def test_random_changes_of_headers_are_refused_or_read(tmp_path: Path) -> None:
    """Whatever the shapes: WeightsError, or matrices that can be read."""
    generator = torch.Generator().manual_seed(3)

    def draw(count: int) -> int:
        return int(torch.randint(0, count, (), generator=generator))

    for turn in range(300):
        name = list(_ALL)[draw(len(_ALL))]
        tensors, _ = _ALL[name].make(32, 128, torch.Generator().manual_seed(turn))
        part = list(tensors)[draw(len(tensors))]
        kinds = (torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn)
        shape = [draw(70) for _ in range(draw(4))]
        tensors[part] = torch.randint(0, 256, shape, generator=generator).to(kinds[draw(len(kinds))])
        folder = tmp_path / str(turn)
        folder.mkdir()
        write(folder, {f"layer.{each}": tensor for each, tensor in tensors.items()})
        stored = stored_format({"quantization_config": _ALL[name].config})
        assert stored is not None
        try:
            with QuantizedSource(SafetensorsSource(folder), stored) as source:
                for matrix, size in source.shapes().items():
                    source.read_into(matrix, torch.empty(size))
                    source.encoded(matrix)
        except WeightsError as refusal:
            assert "layer." in str(refusal)
