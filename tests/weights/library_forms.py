"""The same of bitsandbytes and torchao, whose libraries write a checkpoint's tensors through transformers.

Sources: bitsandbytes' `QuantState.as_dict` and `Int8Params`; torchao's `flatten_tensor_state_dict`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from stored_forms import Form, Made, float8, halves, int8, whole

from engine.cpu_kernels.formats import Format

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def codes(nested: bool, table: str = "nf4", block: int = 64) -> Any:
    def make(n: int, k: int, generator: torch.Generator) -> Made:
        q = whole(0, 16, n * k, generator=generator)
        values = torch.tensor(NF4) if table == "nf4" else torch.rand(16, generator=generator) * 2 - 1
        blocks = -(-n * k // block)
        state: dict[str, object] = {"quant_type": table, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        tensors = {"weight": ((q[::2] << 4) | q[1::2]).to(torch.uint8).view(-1, 1), "weight.quant_map": values}
        absmax = torch.rand(blocks, generator=generator) * 0.2 + 0.01
        if nested:
            inner = whole(0, 256, blocks, generator=generator)
            steps = torch.rand(256, generator=generator) * 0.1
            scales = torch.rand(-(-blocks // 256), generator=generator)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            tensors |= {"weight.nested_absmax": scales, "weight.nested_quant_map": steps}
            tensors["weight.absmax"] = inner.to(torch.uint8)
            absmax = steps[inner] * scales.repeat_interleave(256)[:blocks] + 0.0625
        else:
            tensors["weight.absmax"] = absmax
        note = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{table}"] = note
        found = values[q] * absmax.repeat_interleave(block)[: n * k]
        return tensors, found.view(n, k).double()

    return make


def llm_int8(n: int, k: int, generator: torch.Generator) -> Made:
    q, s = whole(-127, 128, n, k, generator=generator), halves(n, generator=generator) / 8
    tensors = {"weight": q.to(torch.int8), "SCB": s.float() * 127, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, q * s.double()[:, None]


def flattened(make: Any) -> Any:
    """Another form's tensors under torchao's names."""

    def renamed(n: int, k: int, generator: torch.Generator) -> Made:
        tensors, values = make(n, k, generator)
        return {"_weight_qdata" if part == "weight" else f"_{part}": each for part, each in tensors.items()}, values

    return renamed


def intx(n: int, k: int, generator: torch.Generator) -> Made:
    q, z = whole(-8, 8, n, k, generator=generator), whole(-8, 8, n, k // 32, generator=generator)
    s = halves(n, k // 32, generator=generator, dtype=torch.bfloat16)
    tensors = {"weight": q.to(torch.int8), "weight_scale": s, "weight_zero_point": z.to(torch.int8)}
    return tensors, s.double().repeat_interleave(32, 1) * (q - z.repeat_interleave(32, 1))


def int4_sums(n: int, k: int, generator: torch.Generator) -> Made:
    q = whole(-8, 8, n, k, generator=generator)
    s = halves(k // 32, n, generator=generator, dtype=torch.bfloat16)
    added = (torch.randn(k // 32, n, generator=generator) * 0.01).bfloat16()
    packed = ((q[:, ::2] & 15) | (q[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    tensors = {"weight": packed, "weight_scale": s, "weight_zero_point": added}
    by_input = [each.float().t().repeat_interleave(32, 1) for each in (s, added)]
    return tensors, (q * by_input[0] + by_input[1]).double()


def torchao(kind: str, **data: object) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


def _bnb(**more: object) -> dict[str, Any]:
    return {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head"], **more}


_INT8 = {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"group_size": None}}
LIBRARY_FORMS: dict[str, Form] = {
    "bnb_nf4": Form(_bnb(load_in_4bit=True), codes(nested=False), Format.BFLOAT16, exact=False),
    "bnb_nf4_nested": Form(_bnb(load_in_4bit=True), codes(nested=True), Format.BFLOAT16, exact=False),
    "bnb_fp4": Form(_bnb(load_in_4bit=True), codes(False, "fp4", 128), Format.BFLOAT16, exact=False),
    "bnb_int8": Form(_bnb(load_in_8bit=True), llm_int8, Format.Q8_0),
    "torchao_int8": Form(torchao("Int8WeightOnlyConfig"), flattened(int8()), Format.Q8_0),
    "torchao_int8_by_name": Form(
        torchao("FqnToConfig", fqn_to_config={"_default": _INT8, "lm_head": None}), flattened(int8(True)), Format.Q8_0
    ),
    "torchao_intx": Form(
        torchao(
            "IntxWeightOnlyConfig", intx_packing_format={"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"}
        ),
        flattened(intx),
        Format.Q8_0,
    ),
    "torchao_float8": Form(
        torchao("Float8WeightOnlyConfig"), flattened(float8("weight_scale", "channel")), Format.FLOAT8, exact=False
    ),
    "torchao_int4": Form(
        torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="plain"),
        flattened(int4_sums),
        Format.BFLOAT16,
        exact=False,
    ),
}
