"""A model with packed layers computes what the dense model with the same weights computes, in every format."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

sys.path.append(str(Path(__file__).parents[1] / "models"))
sys.path.append(str(Path(__file__).parents[1] / "cpu_kernels"))
from dense_attention import logits_of
from gguf_models import write_gguf
from random_blocks import ENCODINGS, random_weights
from safetensors.torch import save_file
from stored_forms import E2M1
from tiny_models import CASES, MIXTURES, SHAPE, make_model, save
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from attention_backends.toolchain import default_cache_dir
from engine.config import Quantization
from engine.cpu_kernels.formats import Format, packable
from engine.cpu_kernels.linear import LinearOps, load, unpack
from engine.cpu_kernels.quantize import pack_blocks
from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.experts import Experts
from engine.models.gguf_header import read_gguf_header
from engine.models.layers import Linear
from engine.models.packed import ActivatedLinear, JoinedLinear, PackedEmbedding, PackedLinear, ReorderedLinear
from engine.models.packed_experts import PackedExperts
from engine.models.placement import ExpertPlacement
from engine.models.sharding import Shard, sharded
from engine.weights import loader
from engine.weights.as_q8_0 import as_q8_0
from engine.weights.forms import weight_forms
from engine.weights.gguf_source import GgufSource
from engine.weights.loader import load_weights, weight_bytes
from engine.weights.packing import Packer
from engine.weights.sizes import weight_bytes as weight_bytes_of
from engine.weights.source import EncodedRows

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()
PACKED = [case for case in CASES if "window" not in case or "gemma" in case]


@pytest.fixture(scope="module")
def ops() -> LinearOps:
    return load(default_cache_dir())


def wide_model(tied: bool = False, qkv: str = "") -> PreTrainedModel:
    """Large enough for blocks of 256."""
    torch.manual_seed(1)
    shape = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "initializer_range": 0.06}
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=tied)).eval()


def dense(path: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    description = describe(path)
    model = Decoder(description.spec, dtype=dtype)
    load_weights(model, description)
    return model


def packed(path: str, ops: LinearOps, quantization: Quantization, shard: Shard | None = None) -> Decoder:
    description = describe(path)
    spec = description.spec if shard is None else sharded(description.spec, shard)
    model = Decoder(spec, dtype=torch.bfloat16)
    load_weights(model, description, packer=Packer(ops, quantization), shard=shard)
    return model


def assert_ranks_have_its_experts(model: Decoder, path: str, ops: LinearOps, quantization: Quantization) -> None:
    """Byte for byte, each once, where experts are whole in one of three ranks."""
    parts = [packed(path, ops, quantization, Shard(rank, 3, ExpertPlacement())) for rank in range(3)]
    for index, layer in enumerate(model.layers):
        if layer.experts is not None:
            own = [part.layers[index].experts for part in parts]
            for name in ("gate_up", "down"):
                assert torch.equal(torch.cat([getattr(each, name) for each in own]), getattr(layer.experts, name))


def decode_experts(packed: PackedExperts, dense: Experts) -> None:
    first, second = Format(packed.gate_up_format), Format(packed.down_format)
    _, hidden, inner = dense.down.shape
    for expert in range(dense.count):
        mixed = unpack(packed.gate_up[expert], 2 * inner, hidden, first)
        dense.gate_up[expert] = mixed.view(-1, 2, 16, hidden).transpose(0, 1).reshape(2 * inner, hidden)
        dense.down[expert] = unpack(packed.down[expert], hidden, inner, second)
    if packed.gate_up_bias is not None and packed.down_bias is not None:
        dense.gate_up_bias.copy_(packed.gate_up_bias.view(dense.count, -1, 2, 16).transpose(1, 2).flatten(1))
        dense.down_bias.copy_(packed.down_bias)


def decoded(model: Decoder) -> Decoder:
    """The same model with dense float32 layers that hold exactly the weights that the packed ones encode."""
    twin = Decoder(model.spec, dtype=torch.float32)
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            weight = unpack(module.weight, module.n, module.k, Format(module.format))
            if isinstance(module, PackedLinear) and module.gate:
                weight = weight.view(-1, 2, 16, module.k).transpose(0, 1).reshape(module.n, module.k)
            if isinstance(module, ReorderedLinear):
                weight = torch.empty_like(weight).index_copy_(1, module.order.long(), weight)
            bias = getattr(module, "bias", None)
            if bias is not None and module.gate:
                bias = bias.view(-1, 2, 16).transpose(0, 1).reshape(-1)
            head, _, part = name.rpartition(".parts.")
            state.setdefault(head or name, []).append((weight, bias, part))
        elif isinstance(module, PackedExperts):
            decode_experts(module, twin.get_submodule(name))
    for name, parts in state.items():
        layer = twin.get_submodule(name)
        layer.weight.copy_(torch.cat([weight for weight, _, _ in parts]))
        if parts[0][1] is not None:
            layer.bias.copy_(torch.cat([bias for _, bias, _ in parts]))
    own = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        if name in own and own[name].shape == parameter.shape:
            parameter.copy_(own[name])
    return twin


def logprob_error(model: Decoder, exact: torch.Tensor) -> float:
    ours = logits_of(model, PROMPT).log_softmax(-1)
    return (ours - exact.log_softmax(-1)).abs().mean().item()


@pytest.mark.parametrize("case", PACKED)
def test_packed_bfloat16_is_as_close_to_float32_as_dense_bfloat16(case: str, tmp_path: Path, ops: LinearOps) -> None:
    path = save(make_model(case), tmp_path)
    exact = logits_of(dense(path, torch.float32), PROMPT)
    model = packed(path, ops, "none")
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    left = [name for name, module in model.layers.named_modules() if isinstance(module, Linear)]
    assert all(model.layers.get_parameter(f"{name}.weight").dtype == torch.float32 for name in left), "of routers"
    room = 2.0 if case in MIXTURES else 1.3  # where two experts are as good, rounding chooses
    assert logprob_error(model, exact) <= room * logprob_error(dense(path), exact) + 1e-3


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama_tied", "llama_biases", "qwen3", "gemma3_windows", "qwen3_moe", "gpt_oss"])
def test_quantized_models_compute_with_the_weights_they_encode(
    case: str, quantization: Quantization, tmp_path: Path, ops: LinearOps
) -> None:
    model = packed(save(make_model(case), tmp_path), ops, quantization)
    exact = logits_of(decoded(model), PROMPT)
    bf16 = logprob_error(dense(str(tmp_path)), logits_of(dense(str(tmp_path), torch.float32), PROMPT))
    errors = (logits_of(model, PROMPT).log_softmax(-1) - exact.log_softmax(-1)).abs().mean(-1)
    # Where two experts are nearly as good rounding chooses, and later tokens see it: those before are as near as ever.
    error = errors.quantile(0.25) if case in MIXTURES else errors.mean()
    assert error <= 2.5 * bf16 + 0.01, "activations of 8 bits, and bf16 between the layers"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.name)
def test_a_gguf_file_runs_from_its_blocks(
    encoding: GGMLQuantizationType, tied: bool, tmp_path: Path, ops: LinearOps
) -> None:
    path = write_gguf(wide_model(tied), tmp_path / "model.gguf", encoding, random_weights)
    model = packed(path, ops, "gguf")
    formats = {module.format for module in model.modules() if isinstance(module, (PackedLinear, PackedEmbedding))}
    assert formats == {Format[encoding.name]}
    exact = logits_of(dense(path, torch.float32), PROMPT)
    torch.testing.assert_close(logits_of(decoded(model), PROMPT), exact, rtol=1e-4, atol=1e-4)
    assert logprob_error(model, exact) <= 3 * logprob_error(dense(path), exact) + 0.01
    matrices = sum(extent.size_bytes for extent in read_gguf_header(path).tensors.values())
    assert weight_bytes(model) <= 1.1 * matrices, "not inflated (but for padding of 199 tokens to panels of 32)"


@pytest.mark.parametrize(
    ("name", "quantization", "formats"),
    [
        ("Q4_K", "int8", {Format.Q4_K}),
        ("Q8_0", "int8", {Format.Q8_0}),
        ("Q4_K", "int4", {Format.Q4_K}),
        ("Q6_K", "int4", {Format.Q4_1, Format.Q6_K}),  # 8 bits are asked for in tables
        ("F16", "int8", {Format.INT8}),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_int8_and_int4_keep_blocks_of_no_more_bits(
    name: str, quantization: Quantization, formats: set[Format], tied: bool, tmp_path: Path, ops: LinearOps
) -> None:
    path = write_gguf(wide_model(tied), tmp_path / "model.gguf", GGMLQuantizationType[name], random_weights)
    model = packed(path, ops, quantization)
    found = {module.format for module in model.modules() if isinstance(module, (PackedLinear, PackedEmbedding))}
    assert found == formats
    told = weight_bytes_of(describe(path).spec, 2, quantization, "cpu")
    assert weight_bytes(model) <= 1.05 * told, "plans say what all would take"


@pytest.mark.parametrize("case", ["phi3_long_rope", "granite", "glm4", "hunyuan", "ernie4_5", "exaone4", "mixtral"])
def test_blocks_of_every_family_are_the_rows_that_its_decoder_wants(case: str, tmp_path: Path, ops: LinearOps) -> None:
    """Rows that turn together may have to be taken apart within the blocks' matrix."""
    path = write_gguf(make_model(case), tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    model = packed(path, ops, "gguf")
    assert any(module.format == Format.Q8_0 for module in model.modules() if isinstance(module, PackedLinear))
    exact = logits_of(dense(path, torch.float32), PROMPT)
    assert logprob_error(model, exact) <= 3 * logprob_error(dense(path), exact) + 0.01


@pytest.mark.parametrize("case", ["llama", "gpt_oss"])
def test_mxfp4_of_a_gguf_file_runs_from_its_blocks(case: str, tmp_path: Path, ops: LinearOps) -> None:
    path = write_gguf(make_model(case), tmp_path / "model.gguf", GGMLQuantizationType.MXFP4)
    description = describe(path)
    with GgufSource(path, description.spec.facts, []) as source:
        for name, shape in source.shapes().items():
            found = source.encoded(name, 0 if len(shape) == 3 else None)
            if found is not None:
                values = torch.empty(shape[-2:])
                source.read_into(name, values, 0 if len(shape) == 3 else None)
                assert found.format is Format.MXFP4
                eight = as_q8_0(found.format, found.rows)
                assert eight is not None
                for rows, format in ((found.rows, Format.MXFP4), (eight, Format.Q8_0)):
                    if packable(*shape[-2:], format):
                        assert torch.equal(unpack(pack_blocks(rows, format), *shape[-2:], format), values)
    model = packed(path, ops, "gguf")
    if case == "gpt_oss":
        assert_ranks_have_its_experts(model, path, ops, "gguf")
    formats = {(layer.k % 64, layer.format) for layer in model.modules() if isinstance(layer, PackedLinear)}
    assert (0, Format.MXFP4) in formats
    assert formats <= {(0, Format.MXFP4), (32, Format.Q8_0), (0, Format.BFLOAT16)}, "routers have 16 bits"
    assert weight_bytes(model) <= 0.6 * weight_bytes(packed(path, ops, "none"))


def test_what_no_kernel_multiplies_is_told_with_what_it_takes(
    tmp_path: Path, ops: LinearOps, caplog: pytest.LogCaptureFixture
) -> None:
    def random_bytes(values: np.ndarray, encoding: GGMLQuantizationType) -> np.ndarray:
        size = values.shape[1] // 256 * GGML_QUANT_SIZES[encoding][1] if values.ndim > 1 else 0
        return np.zeros((len(values), size), np.uint8) if size else values

    path = write_gguf(wide_model(), tmp_path / "model.gguf", GGMLQuantizationType.IQ2_S, random_bytes)
    model = packed(path, ops, "gguf")
    assert {module.format for module in model.modules() if isinstance(module, PackedLinear)} == {Format.BFLOAT16}
    (said,) = [record.getMessage() for record in caplog.records if record.name.endswith("gguf_source")]
    assert "no kernel multiplies IQ2_S" in said and "as bfloat16" in said


@pytest.mark.parametrize("name", ["Q5_0", "IQ4_NL"])
def test_parts_that_eight_bits_hold_run_together(name: str, tmp_path: Path, ops: LinearOps) -> None:
    """As Q4_K_M files have them where blocks of 256 do not fit: q and k in five bits, v of some layers in eight."""
    path = write_gguf(wide_model(), tmp_path / "model.gguf", GGMLQuantizationType[name], random_weights)
    description = describe(path)
    model = Decoder(description.spec, dtype=torch.bfloat16)

    class Mixed(GgufSource):
        def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
            found = super().encoded(name, expert)
            if found is None or not ("v_proj" in name or "up_proj" in name):
                return found
            rows = as_q8_0(found.format, found.rows)
            return None if rows is None else EncodedRows(Format.Q8_0, rows)

    rows = loader.family_named(description.spec.family).weight_rows(model.spec)
    with Mixed(path, model.spec.facts, list(rows)) as source, torch.no_grad():
        loader._fill(model, source, rows, Packer(ops, "gguf"))
    layer = model.layers[0]
    assert [each.format for each in (layer.qkv_proj, layer.gate_up_proj, layer.o_proj)] == [
        Format.Q8_0,
        Format.Q8_0,
        Format[name],
    ]
    values = decoded(model)
    for parameter_name, parameter in dense(path, torch.float32).named_parameters():
        assert torch.equal(values.get_parameter(parameter_name), parameter), parameter_name


def test_experts_of_gpt_oss_run_from_their_mxfp4(tmp_path: Path, ops: LinearOps) -> None:
    origin = make_model("gpt_oss")
    tensors = {}
    with torch.no_grad():
        for name, values in origin.state_dict().items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = values
                continue
            groups = values.mT.unflatten(2, (-1, 32))
            power = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
            levels = (groups[..., None] / 2.0 ** power[..., None] - E2M1).abs().argmin(-1)
            values.copy_((E2M1[levels] * 2.0**power).flatten(2).mT)
            tensors[f"{name}_blocks"] = (levels[..., ::2] | (levels[..., 1::2] << 4)).to(torch.uint8)
            tensors[f"{name}_scales"] = (power[..., 0] + 127).to(torch.uint8)
    config = json.loads(origin.config.to_json_string()) | {"architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: values.contiguous() for name, values in tensors.items()}, tmp_path / "model.safetensors")
    model = packed(str(tmp_path), ops, "stored")
    assert_ranks_have_its_experts(model, str(tmp_path), ops, "stored")
    for layer, theirs in zip(model.layers, origin.model.layers, strict=True):
        assert (layer.experts.gate_up_format, layer.experts.down_format) == (Format.MXFP4, Format.Q8_0)
        dense = Experts(model.spec.layers[0].experts, 64, torch.float32, torch.device("cpu"))
        decode_experts(layer.experts, dense)
        gate_up = theirs.mlp.experts.gate_up_proj.mT
        assert torch.equal(dense.gate_up, torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1))
        assert torch.equal(dense.down, theirs.mlp.experts.down_proj.mT)


def test_parts_of_one_matrix_may_be_encoded_differently(tmp_path: Path, ops: LinearOps) -> None:
    path = write_gguf(wide_model(), tmp_path / "model.gguf", GGMLQuantizationType.Q4_0)
    description = describe(path)
    model = Decoder(description.spec, dtype=torch.bfloat16)

    class Mixed(GgufSource):
        """As if values had been stored in 16 bits."""

        def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
            return None if "v_proj" in name or "up_proj" in name else super().encoded(name, expert)

    rows = loader.family_named(description.spec.family).weight_rows(model.spec)
    with Mixed(path, model.spec.facts, list(rows)) as source, torch.no_grad():
        loader._fill(model, source, rows, Packer(ops, "gguf"))
    joined = model.layers[0].qkv_proj
    assert isinstance(joined, JoinedLinear)
    assert [(part.n, part.format) for part in joined.parts] == [(384, Format.Q4_0), (128, Format.BFLOAT16)]
    assert model.layers[0].gate_up_proj.format == Format.BFLOAT16
    exact = logits_of(dense(path, torch.float32), PROMPT)
    assert logprob_error(model, exact) <= 3 * logprob_error(dense(path), exact) + 0.01


def test_the_log_of_the_start_tells_in_which_forms_weights_are_kept(tmp_path: Path, ops: LinearOps) -> None:
    path = save(make_model("gpt_oss"), tmp_path)
    for quantization, forms in (("none", {"bfloat16", "float32"}), ("int4", {"q4_1", "int8", "bfloat16", "float32"})):
        model = packed(path, ops, quantization)
        said = weight_forms(model)
        assert {part.split()[-1] for part in said.split(", ")} == forms, said
        units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
        total = sum(float(number) * units[unit] for number, unit, _ in (part.split() for part in said.split(", ")))
        assert total == pytest.approx(weight_bytes(model), rel=0.05)


def test_a_matrix_that_cannot_be_packed_stays_dense(tmp_path: Path, ops: LinearOps) -> None:
    torch.manual_seed(0)
    odd = LlamaConfig(**{**SHAPE, "intermediate_size": 91})
    path = save(AutoModelForCausalLM.from_config(odd), tmp_path)
    model = packed(path, ops, "none")
    assert isinstance(model.layers[0].down_proj, Linear)
    assert isinstance(model.layers[0].gate_up_proj, ActivatedLinear), "91 gates do not fill half panels"
    assert isinstance(model.layers[0].qkv_proj, PackedLinear)
    exact = logits_of(dense(path, torch.float32), PROMPT)
    assert logprob_error(model, exact) <= 1.3 * logprob_error(dense(path), exact) + 1e-3


def test_dummy_weights_are_packed_too(tmp_path: Path, ops: LinearOps) -> None:
    description = describe(save(make_model("llama_tied"), tmp_path))
    model = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(model, description, load_format="dummy", seed=3, packer=Packer(ops, "int8"))
    plain = Decoder(description.spec, dtype=torch.bfloat16)
    load_weights(plain, description, load_format="dummy", seed=3)
    torch.testing.assert_close(
        decoded(model).layers[0].o_proj.weight, plain.layers[0].o_proj.weight.float(), rtol=0, atol=1e-3
    )
