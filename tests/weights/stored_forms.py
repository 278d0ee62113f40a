"""Quantised matrices made from whole numbers, written bit by bit as the publishers of each format describe it, beside
the values that they stand for: an oracle that shares no code with the reader."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from engine.cpu_kernels.formats import Format

Made = tuple[dict[str, Tensor], Tensor]
"""tensors by the last part of their names, and float64 values"""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@dataclass(frozen=True)
class Form:
    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], Made]
    format: Format
    """in which it runs packed"""
    exact: bool = True
    """it runs with exactly these values; otherwise as bfloat16, which rounds them"""


def words(numbers: Tensor, bits: int) -> Tensor:
    """[rows, numbers] → int32 [rows, words]: the first number in the lowest bits of a word."""
    rows, count = numbers.shape
    per_word = 32 // bits
    padded = torch.zeros(rows, -(-count // per_word) * per_word, dtype=torch.int64)
    padded[:, :count] = numbers
    shifted = padded.view(rows, -1, per_word) << (bits * torch.arange(per_word))
    total = shifted.sum(2)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def halves(*shape: int, generator: torch.Generator, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.02 + 0.005).to(dtype)


def whole(low: int, high: int, *shape: int, generator: torch.Generator) -> Tensor:
    """low to high - 1"""
    return torch.randint(low, high, shape, generator=generator)


def gptq(
    bits: int = 4, group: int = 32, sym: bool = False, offset: int = 1, acts: Literal["", "shared", "own"] = ""
) -> Any:
    """`acts`: inputs are ordered by their activations, those of matrices over the same inputs alike, or not."""

    def make(n: int, k: int, generator: torch.Generator) -> Made:
        size = k if group == -1 else group
        groups = -(-k // size)
        order = torch.arange(k) // size
        if acts:
            own = generator if acts == "own" else torch.Generator().manual_seed(k)
            order = order[torch.randperm(k, generator=own)]
        q = whole(0, 2**bits, n, k, generator=generator)
        z = torch.full((n, groups), 2 ** (bits - 1)) if sym else whole(0, 2**bits, n, groups, generator=generator)
        s = halves(n, groups, generator=generator)
        tensors = {
            "qweight": words(q, bits).t().contiguous(),
            "qzeros": words((z.t() - offset) % 2**bits, bits),
            "scales": s.t().contiguous(),
            "g_idx": order.to(torch.int32),
        }
        return tensors, s.double()[:, order] * (q - z[:, order])

    return make


def awq(group: int = 32) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        groups = k // group
        q, z = whole(0, 16, n, k, generator=generator), whole(0, 16, n, groups, generator=generator)
        s = halves(n, groups, generator=generator)
        tensors = {"qweight": _awq_words(q.t()), "qzeros": _awq_words(z.t()), "scales": s.t().contiguous()}
        return tensors, s.double().repeat_interleave(group, 1) * (q - z.repeat_interleave(group, 1))

    return make


def _awq_words(numbers: Tensor) -> Tensor:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return words(numbers.reshape(len(numbers), -1, 8)[:, :, order].flatten(1), 4)


def packed(bits: int = 4, group: int = 32, sym: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        size, half = (k if group == -1 else group), 2 ** (bits - 1)
        groups = k // size
        q = whole(-half, half, n, k, generator=generator)
        z = torch.zeros(n, groups, dtype=torch.int64) if sym else whole(-half, half, n, groups, generator=generator)
        s = halves(n, groups, generator=generator, dtype=dtype)
        tensors = {
            "weight_packed": words(q + half, bits),
            "weight_scale": s,
            "weight_shape": torch.tensor([n, k]),
        }
        if not sym:
            tensors["weight_zero_point"] = words((z + half).t(), bits).t().contiguous()
        return tensors, s.double().repeat_interleave(size, 1) * (q - z.repeat_interleave(size, 1))

    return make


def int8(asymmetric: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        # Symmetric numbers reach both ends; those with a zero point leave room for the difference.
        q = whole(-60, 61, n, k, generator=generator) if asymmetric else whole(-128, 128, n, k, generator=generator)
        z = whole(-60, 61, n, 1, generator=generator) if asymmetric else torch.zeros(n, 1, dtype=torch.int64)
        s = halves(n, 1, generator=generator, dtype=dtype) / 8
        tensors = {"weight": q.to(torch.int8), "weight_scale": s}
        if asymmetric:
            tensors["weight_zero_point"] = z.to(torch.int8)
        return tensors, s.double() * (q - z)

    return make


def float8(
    scale_name: str, kind: str, dtype: torch.dtype = torch.float32, of: torch.dtype = torch.float8_e4m3fn
) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        w = (torch.randn(n, k, generator=generator) * 8).to(of)
        shape = {"tensor": (), "one": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
        s = halves(*shape, generator=generator, dtype=dtype)
        by_weight = s.float().reshape(-1, 1) if kind != "block" else s.float()
        if kind == "block":
            by_weight = by_weight.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return {"weight": w, scale_name: s}, (w.float() * by_weight).double()

    return make


def nvfp4(n: int, k: int, generator: torch.Generator) -> Made:
    q = whole(0, 16, n, k, generator=generator)
    s = (torch.rand(n, k // 16, generator=generator) * 100 + 10).to(torch.float8_e4m3fn)
    total = torch.tensor([1234.5])
    by_group = s.float() / total  # float32, as the library divides
    values = E2M1[q].float() * by_group.repeat_interleave(16, 1)
    return {"weight_packed": _pairs(q), "weight_scale": s, "weight_global_scale": total}, values.double()


def mxfp4(low: int, high: int) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        q, e = whole(0, 16, n, k, generator=generator), whole(low, high, n, k // 32, generator=generator)
        values = E2M1[q] * 2.0 ** (e.double() - 127).repeat_interleave(32, 1)
        return {"weight_packed": _pairs(q), "weight_scale": e.to(torch.uint8)}, values

    return make


def _pairs(q: Tensor) -> Tensor:
    return (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8)


def _gptq_config(bits: int = 4, group: int = 32, **more: object) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False, **more}


def _compressed(format: str, **weights: object) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _ints(bits: int, strategy: str, group: int | None, **more: object) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, **more}
    return _compressed("pack-quantized" if strategy == "group" or bits == 4 else "int-quantized", **numbers)


def _floats(format: str, bits: int, strategy: str, **more: object) -> dict[str, Any]:
    return _compressed(format, num_bits=bits, type="float", strategy=strategy, **more)


_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}

FORMS: dict[str, Form] = {
    "gptq": Form(_gptq_config(), gptq(), Format.INT4_GROUP),
    "gptq_symmetric": Form(_gptq_config(sym=True), gptq(sym=True), Format.Q4_0),
    "gptq_64": Form(_gptq_config(group=64), gptq(group=64), Format.INT4_GROUP),
    "gptq_128": Form(_gptq_config(group=128, sym=True), gptq(group=128, sym=True), Format.Q4_0),
    "gptq_channel": Form(_gptq_config(group=-1), gptq(group=-1), Format.INT4_GROUP),
    "gptq_v2": Form(_gptq_config(checkpoint_format="gptq_v2"), gptq(offset=0), Format.INT4_GROUP),
    "gptq_8": Form(_gptq_config(bits=8, sym=True), gptq(bits=8, sym=True), Format.Q8_0),
    "gptq_act_order": Form(_gptq_config(desc_act=True), gptq(acts="shared"), Format.INT4_GROUP),
    "gptq_8_act_order": Form(
        _gptq_config(bits=8, group=64, sym=True, desc_act=True),
        gptq(bits=8, group=64, sym=True, acts="shared"),
        Format.Q8_0,
    ),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq(), Format.INT4_GROUP),
    "awq_64": Form(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, awq(64), Format.INT4_GROUP
    ),
    "auto_round": Form(
        {**_AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "sym": False}, gptq(), Format.INT4_GROUP
    ),
    "auto_round_symmetric": Form(
        {**_AUTO_ROUND, "packing_format": "auto_gptq", "sym": True}, gptq(sym=True), Format.Q4_0
    ),
    "auto_round_awq": Form({**_AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, awq(), Format.INT4_GROUP),
    "packed": Form(_ints(4, "group", 32), packed(), Format.Q4_0),
    "packed_float16": Form(_ints(4, "group", 64), packed(group=64, dtype=torch.float16), Format.Q4_0),
    "packed_asymmetric": Form(_ints(4, "group", 32, symmetric=False), packed(sym=False), Format.INT4_GROUP),
    "packed_channel": Form(_ints(4, "channel", None), packed(group=-1), Format.Q4_0),
    "packed_8": Form(_ints(8, "group", 128), packed(bits=8, group=128), Format.Q8_0),
    "int8": Form(_ints(8, "channel", None), int8(), Format.Q8_0),
    "int8_asymmetric": Form(_ints(8, "channel", None, symmetric=False), int8(asymmetric=True), Format.Q8_0),
    "float8_tensor": Form(
        _floats("float-quantized", 8, "tensor"), float8("weight_scale", "one"), Format.FLOAT8, exact=False
    ),
    "float8_channel": Form(
        _floats("float-quantized", 8, "channel"),
        float8("weight_scale", "channel", torch.bfloat16),
        Format.FLOAT8,
        exact=False,
    ),
    "float8_block": Form(
        _floats("float-quantized", 8, "block", block_structure=[128, 128]),
        float8("weight_scale", "block"),
        Format.FLOAT8_BLOCK,
        exact=False,
    ),
    "fp8_blocks": Form(
        {**_FP8, "weight_block_size": [128, 128]}, float8("weight_scale_inv", "block"), Format.FLOAT8_BLOCK, exact=False
    ),
    "fp8_tensor": Form(_FP8, float8("weight_scale", "tensor"), Format.FLOAT8, exact=False),
    "fp8_e5m2": Form(_FP8, float8("weight_scale", "channel", of=torch.float8_e5m2), Format.BFLOAT16, exact=False),
    "nvfp4": Form(_floats("nvfp4-pack-quantized", 4, "tensor_group", group_size=16), nvfp4, Format.NVFP4),
    "mxfp4": Form(_floats("mxfp4-pack-quantized", 4, "group", group_size=32), mxfp4(115, 125), Format.MXFP4),
    "mxfp4_of_any_scale": Form(_floats("mxfp4-pack-quantized", 4, "group", group_size=32), mxfp4(1, 125), Format.MXFP4),
}


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> str:
    """A checkpoint of these tensors."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


LLAMA = LlamaConfig(
    vocab_size=224,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
)


def quantized_llama(form: Form, folder: Path, seed: int = 0) -> PreTrainedModel:
    return quantized_model(LLAMA, form, folder, seed)


def quantized_model(made_by: PreTrainedConfig, form: Form, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Writes a tiny model with random quantised layers, and gives the float32 model that it stands for."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made_by).eval()
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if "_proj" not in name:
            tensors[name] = parameter.bfloat16()
            parameter.copy_(tensors[name])
            continue
        made, values = form.make(*parameter.shape, generator)
        tensors |= {name.replace("weight", part): tensor for part, tensor in made.items()}
        parameter.copy_(values)
    config = {**made_by.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16"}
    write(folder, tensors, {**config, "quantization_config": form.config})
    return model
