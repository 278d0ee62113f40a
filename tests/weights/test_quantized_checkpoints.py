"""Quantised Hugging Face checkpoints: read as their publishers mean them, served packed where that is exact."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from library_forms import LIBRARY_FORMS
from stored_forms import E2M1, FORMS, Form, _pairs, gptq, quantized_llama, write
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "models"))
from dense_attention import logits_of
from test_packed_models import PROMPT, decoded, logprob_error

from attention_backends.toolchain import default_cache_dir
from engine.config import EngineArgs
from engine.cpu_kernels.formats import Format, packed_bytes
from engine.cpu_kernels.linear import LinearOps, load, unpack
from engine.cpu_kernels.quantize import pack_blocks
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.device_packed import StoredLinear
from engine.models.packed import PackedLinear
from engine.models.packed_experts import PackedExperts
from engine.models.quantization import stored_format
from engine.resolve import resolve_here
from engine.runner.loading import load_parts
from engine.weights.device_packing import DevicePacker
from engine.weights.loader import load_weights, weight_bytes
from engine.weights.packing import Packer
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.sizes import stored_weight_bytes

_ALL = FORMS | LIBRARY_FORMS
_by_form = pytest.mark.parametrize("form", _ALL.values(), ids=list(_ALL))


@pytest.fixture(scope="module")
def ops() -> LinearOps:
    return load(default_cache_dir())


def opened(folder: Path, form: Form) -> QuantizedSource:
    stored = stored_format({"quantization_config": form.config})
    assert stored is not None
    return QuantizedSource(SafetensorsSource(folder), stored)


def _runs_as(form: Form, k: int) -> Format:
    """One block of inputs is a scale of an output."""
    return Format.FLOAT8 if form.format is Format.FLOAT8_BLOCK and k == 128 else form.format


@_by_form
def test_a_hundred_matrices_are_read_as_they_are_published_and_packed_without_a_change(
    form: Form, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors, values = {}, {}
    for index in range(100):
        n, k = 8 * int(torch.randint(1, 12, (), generator=generator)), 128 * (1 + index % 3)
        made, values[f"{index}.weight"] = form.make(n, k, generator)
        tensors |= {f"{index}.{part}": tensor for part, tensor in made.items()}
    write(tmp_path, tensors)
    with opened(tmp_path, form) as source:
        assert source.shapes() == {name: tuple(each.shape) for name, each in values.items()}
        for name, expected in values.items():
            n, k = expected.shape
            read = torch.empty(n, k)
            source.read_into(name, read)
            assert torch.equal(read.double(), expected), "float32 holds it"
            short = torch.empty(n, k, dtype=torch.bfloat16)
            source.read_into(name, short)
            assert torch.equal(short, read.bfloat16())
            found = source.encoded(name)
            assert (found.format if found is not None else Format.BFLOAT16) is _runs_as(form, k)
            if found is not None:
                packed = unpack(pack_blocks(found.rows, found.format), n, k, found.format)
                assert torch.equal(packed, read if found.order is None else read[:, found.order])


@_by_form
def test_a_model_in_float32_is_the_dequantised_model(form: Form, tmp_path: Path) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized.mkdir()
    quantized_llama(form, quantized).save_pretrained(plain)
    logits = [logits_of(_dense(str(path)), PROMPT) for path in (quantized, plain)]
    assert torch.equal(*logits)


def _dense(path: str) -> Decoder:
    description = describe(path)
    model = Decoder(description.spec, dtype=torch.float32)
    load_weights(model, description)
    return model


@_by_form
def test_a_model_in_bfloat16_stays_packed(form: Form, tmp_path: Path, ops: LinearOps) -> None:
    quantized_llama(form, tmp_path)
    description = describe(str(tmp_path))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=Packer(ops, "stored"))
    layers = [module for module in model.layers.modules() if isinstance(module, PackedLinear)]
    assert all(Format(layer.format) is _runs_as(form, layer.k) for layer in layers)
    assert len(layers) == 4 * len(model.layers), "merged as the matrices of other checkpoints"
    for layer in layers:
        assert layer.weight.nbytes == packed_bytes(layer.n, layer.k, Format(layer.format))
    exact = logits_of(_dense(str(tmp_path)), PROMPT)
    values = logits_of(decoded(model), PROMPT)
    torch.testing.assert_close(values, exact, rtol=1e-3 if form.exact else 0.1, atol=1e-3 if form.exact else 0.1)
    rounded = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(rounded, description)
    assert logprob_error(model, exact) <= 3 * logprob_error(rounded, exact) + 0.01


@pytest.mark.parametrize("name", ["fp8_tensor", "float8_channel", "fp8_blocks", "mxfp4"])
def test_floats_lie_on_a_gpu_as_they_are_stored(name: str, tmp_path: Path) -> None:
    quantized_llama(FORMS[name], tmp_path)
    exact, description = _dense(str(tmp_path)), describe(str(tmp_path))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=DevicePacker("stored", torch.bfloat16, torch.device("cpu")))
    stored = {name: each for name, each in model.layers.named_modules() if isinstance(each, StoredLinear)}
    assert len(stored) == 4 * len(model.layers)
    for layer, found in stored.items():
        values = exact.layers.get_submodule(layer).weight
        if name == "mxfp4":
            levels, scales = found.levels.float(), found.scales.view(torch.float16).float()
        else:
            levels, scales = found.levels.view(torch.float8_e4m3fn).float(), found.scales
        assert torch.equal(levels * scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1), values)


@_by_form
def test_planned_bytes_are_those_of_the_loaded_model(form: Form, tmp_path: Path, native_cache: Path) -> None:
    quantized_llama(form, tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cpu", cache_dir=str(native_cache))
    description, config = resolve_here(args)
    assert config.model.quantization == "stored" and description.quantized is not None
    told = stored_weight_bytes(str(tmp_path), description.quantized, description.spec)
    loaded = load_parts(config).weight_bytes
    if form.config.get("desc_act"):
        assert told < loaded < 1.02 * told, "the order of inputs"
    else:
        assert told == loaded


def test_matrices_over_the_same_inputs_may_order_them_differently(tmp_path: Path, ops: LinearOps) -> None:
    quantized_llama(Form(FORMS["gptq_act_order"].config, gptq(acts="own"), Format.INT4_GROUP), tmp_path)
    description = describe(str(tmp_path))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=Packer(ops, "stored"))
    layer = model.layers[0]
    assert [part.format for part in layer.qkv_proj.parts] == [Format.INT4_GROUP] * 3
    assert layer.gate_up_proj.format == Format.BFLOAT16, "gate and up share panels"
    exact = logits_of(_dense(str(tmp_path)), PROMPT)
    torch.testing.assert_close(logits_of(decoded(model), PROMPT), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("form", "quantization", "layers", "table"),
    [
        ("awq", "none", Format.BFLOAT16, Format.BFLOAT16),
        ("awq", "auto", Format.INT4_GROUP, Format.BFLOAT16),
        ("awq", "int8", Format.INT4_GROUP, Format.INT8),
        ("awq", "int4", Format.INT4_GROUP, Format.INT8),
        ("int8", "int8", Format.Q8_0, Format.INT8),
        ("int8", "int4", Format.Q4_1, Format.INT8),
        ("fp8_tensor", "int8", Format.FLOAT8, Format.INT8),
        ("fp8_tensor", "fp8", Format.FLOAT8, Format.BFLOAT16),
        ("fp8_tensor", "int4", Format.Q4_1, Format.INT8),
        ("nvfp4", "int4", Format.NVFP4, Format.INT8),
        ("bnb_nf4", "int4", Format.Q4_1, Format.INT8),
        ("bnb_nf4", "fp8", Format.FLOAT8, Format.INT8),
        ("awq", "fp8", Format.INT4_GROUP, Format.INT8),
    ],
)
def test_int8_and_int4_quantise_what_is_stored_in_more_bits(
    form: str, quantization: Any, layers: Format, table: Format, tmp_path: Path, native_cache: Path
) -> None:
    quantized_llama(_ALL[form], tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cpu", cache_dir=str(native_cache), quantization=quantization)
    model = load_parts(resolve_here(args)[1]).model
    assert {each.format for each in model.layers.modules() if isinstance(each, PackedLinear)} == {layers}
    assert model.lm_head.format == table


def test_float32_decodes_and_what_is_no_quantization_is_refused(tmp_path: Path) -> None:
    quantized_llama(FORMS["awq"], tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cpu", dtype="float32")
    assert resolve_here(args)[1].model.quantization == "none"
    with pytest.raises(ConfigError, match="quantization"):
        EngineArgs(model=str(tmp_path), quantization="squeezellm")


def test_layers_that_were_left_out_and_calibration_are_understood(tmp_path: Path, ops: LinearOps) -> None:
    form = FORMS["packed"]
    quantized_llama(form, tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn"
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{prefix}.v_proj.{part}"]
    plain = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors |= {
        f"{prefix}.v_proj.weight": plain,
        f"{prefix}.q_proj.input_scale": torch.ones(1),
        f"{prefix}.k_proj.k_scale": torch.ones(1),
    }
    write(tmp_path, tensors)
    description = describe(str(tmp_path))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=Packer(ops, "stored"))
    parts = [(part.n, part.format) for part in model.layers[0].qkv_proj.parts]
    assert parts == [(192, Format.Q4_0), (64, Format.BFLOAT16)]
    assert torch.equal(decoded(model).layers[0].qkv_proj.weight[192:], plain.float())


def test_what_runs_wider_than_it_is_stored_is_said_with_the_memory_it_takes(
    tmp_path: Path, ops: LinearOps, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for name in ("gptq", "fp8_e5m2"):
            folder = tmp_path / name
            folder.mkdir()
            quantized_llama(FORMS[name], folder)
            description = describe(str(folder))
            model = Decoder(description.spec, dtype=torch.bfloat16)
            load_weights(model, description, packer=Packer(ops, "stored"))
        quantized_llama(FORMS["awq"], folder)
        _dense(str(folder))
    said = [record.getMessage() for record in caplog.records if record.name.endswith("quantized_source")]
    assert said[0] == "gptq: 14 matrices run packed, as they are stored"
    size = "576KiB as bfloat16"  # 2 layers of (256 + 128 + 512 + 256) x 128
    assert said[1] == f"fp8: 14 matrices were dequantised (no kernel multiplies e5m2): {size}"
    assert said[2].startswith("awq: 14 matrices were dequantised (packed layers need 16 bits, a form that the device")


def test_experts_of_gpt_oss_are_read_under_the_names_of_the_unquantised_model(tmp_path: Path) -> None:
    experts, n, k = 3, 24, 192
    generator = torch.Generator().manual_seed(1)
    q = torch.randint(0, 16, (experts, n, k), generator=generator)
    e = torch.randint(110, 130, (experts, n, k // 32), generator=generator)
    blocks = torch.stack([_pairs(each) for each in q]).view(experts, n, k // 32, 16)
    write(tmp_path, {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": e.to(torch.uint8)})
    stored = stored_format({"quantization_config": {"quant_method": "mxfp4"}})
    assert stored is not None
    with QuantizedSource(SafetensorsSource(tmp_path), stored) as source:
        assert source.shapes() == {"mlp.experts.down_proj": (experts, k, n)}
        read = torch.empty(experts, k, n)
        source.read_into("mlp.experts.down_proj", read)
        assert source.encoded("mlp.experts.down_proj") is None, "all of them have no rows"
        for expert in range(experts):
            one = torch.empty(k, n)
            source.read_into("mlp.experts.down_proj", one, expert)
            assert torch.equal(one, read[expert])
            found = source.encoded("mlp.experts.down_proj", expert)
            assert found is not None and found.format is Format.MXFP4
            values = unpack(pack_blocks(found.rows, found.format), n, k, found.format)
            assert torch.equal(values, one.T), "rows of outputs"
    expected = E2M1[q] * 2.0 ** (e.double() - 127).repeat_interleave(32, 2)
    assert torch.equal(read.double(), expected.transpose(1, 2))
    library = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    assert torch.equal(read.bfloat16(), library(blocks, e.to(torch.uint8)))


def test_gpt_oss_runs_from_its_blocks(tmp_path: Path, ops: LinearOps) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    quantized.mkdir()
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=224,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(3)
    model = GptOssForCausalLM(config).eval()
    tensors = {}
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.state_dict().items():
        tensors[name] = parameter.bfloat16()
        parameter.copy_(tensors[name])
        if name.endswith(("gate_up_proj", "down_proj")):
            count, k, n = parameter.shape
            q = torch.randint(0, 16, (count * n, k), generator=generator)
            e = torch.randint(120, 124, (count * n, k // 32), generator=generator)
            values = E2M1[q] * 2.0 ** (e.double() - 127).repeat_interleave(32, 1)
            parameter.copy_(values.view(count, n, k).mT)
            del tensors[name]
            tensors[f"{name}_blocks"] = _pairs(q).view(count, n, k // 32, 16)
            tensors[f"{name}_scales"] = e.to(torch.uint8).view(count, n, k // 32)
    model.save_pretrained(plain)
    stored = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    write(quantized, tensors, {**config.to_dict(), **stored})
    exact = logits_of(_dense(str(plain)), PROMPT)
    torch.testing.assert_close(logits_of(_dense(str(quantized)), PROMPT), exact)
    description = describe(str(quantized))
    runs = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(runs, description, packer=Packer(ops, "stored"))
    experts = [module for module in runs.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == 2
    assert {(each.gate_up_format, each.down_format) for each in experts} == {(Format.MXFP4, Format.MXFP4)}
    assert experts[0].gate_up.nbytes == 4 * packed_bytes(128, 64, Format.MXFP4)
    rounded = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(rounded, description)
    assert logprob_error(runs, exact) <= 3 * logprob_error(rounded, exact) + 0.01
    assert description.quantized is not None
    told = stored_weight_bytes(str(quantized), description.quantized, description.spec)
    assert weight_bytes(runs) <= told <= 1.1 * weight_bytes(runs), "biases of experts count as if they were packed"


def test_float8_that_holds_nan_is_dequantised(tmp_path: Path) -> None:
    made, _ = FORMS["fp8_tensor"].make(32, 128, torch.Generator().manual_seed(4))
    made["weight"].view(torch.uint8)[3, 5] = 0xFF
    write(tmp_path, {f"a.{part}": tensor for part, tensor in made.items()})
    with opened(tmp_path, FORMS["fp8_tensor"]) as source:
        assert source.encoded("a.weight") is None
        read = torch.empty(32, 128)
        source.read_into("a.weight", read)
        assert read.isnan().nonzero().tolist() == [[3, 5]]


def test_groups_that_do_not_divide_the_inputs_end_with_a_shorter_one(tmp_path: Path) -> None:
    form = FORMS["gptq_64"]
    made, values = form.make(32, 160, torch.Generator().manual_seed(4))
    for with_index in (True, False):
        if not with_index:
            del made["g_idx"]
        write(tmp_path, {f"a.{part}": tensor for part, tensor in made.items()})
        with opened(tmp_path, form) as source:
            read = torch.empty(32, 160)
            source.read_into("a.weight", read)
            assert torch.equal(read.double(), values)
            found = source.encoded("a.weight")
            assert found is not None and found.format is Format.INT4_GROUP
            assert torch.equal(unpack(pack_blocks(found.rows, found.format), 32, 160, found.format), read)


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("gptq_8", lambda made: made | {"qzeros": made["qzeros"] ^ 0x55555555}),  # 9 bits with their sign
        ("packed", lambda made: made | {"weight_scale": made["weight_scale"] * 2.0**-20}),
        ("packed", lambda made: made | {"weight_scale": made["weight_scale"].float() * 2.0**30}),
        ("fp8_tensor", lambda made: made | {"weight_scale": torch.tensor(2.0**120)}),
    ],
    ids=["nine bits", "below float16", "above float16", "huge"],
)
def test_what_no_block_holds_is_dequantised(
    form: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    made, _ = FORMS[form].make(32, 128, torch.Generator().manual_seed(4))
    write(tmp_path, {f"a.{part}": tensor for part, tensor in change(made).items()})
    with opened(tmp_path, FORMS[form]) as source:
        assert source.encoded("a.weight") is None
        read = torch.empty(32, 128)
        source.read_into("a.weight", read)
        assert bool(read.isfinite().all()) and bool(read.any())
