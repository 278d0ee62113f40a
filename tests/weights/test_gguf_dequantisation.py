"""Every encoding decodes to what its definition says: a float64 loop over bytes, and gguf's own decoder to the bit."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from engine.errors import WeightsError
from engine.weights.gguf_dequant import dequantize_into


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * signed(byte) for byte in block[2:]]


def nibbles(packed: bytes) -> list[int]:
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def q4_0(block: bytes) -> list[float]:
    return [half(block, 0) * (value - 8) for value in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block, 0) * value + half(block, 2) for value in nibbles(block[4:])]


def q5_0(block: bytes) -> list[float]:
    high = int.from_bytes(block[2:6], "little")
    return [half(block, 0) * ((value | (high >> at & 1) << 4) - 16) for at, value in enumerate(nibbles(block[6:]))]


def six_bit_pair(packed: bytes, sub_block: int) -> tuple[int, int]:
    """Scale and minimum of one of eight sub-blocks: the first four whole, the rest split over two places."""
    if sub_block < 4:
        return packed[sub_block] & 63, packed[sub_block + 4] & 63
    low = packed[sub_block + 4]
    return (low & 15) | (packed[sub_block - 4] >> 6) << 4, (low >> 4) | (packed[sub_block] >> 6) << 4


def q4_k(block: bytes) -> list[float]:
    values = []
    for sub_block in range(8):
        scale, minimum = six_bit_pair(block[4:16], sub_block)
        packed = block[16 + 32 * (sub_block // 2) :][:32]
        for byte in packed:
            value = byte >> 4 if sub_block % 2 else byte & 15
            values.append(half(block, 0) * scale * value - half(block, 2) * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    values = []
    for sub_block in range(8):
        scale, minimum = six_bit_pair(block[4:16], sub_block)
        packed = block[48 + 32 * (sub_block // 2) :][:32]
        for position, byte in enumerate(packed):
            value = (byte >> 4 if sub_block % 2 else byte & 15) + 16 * (block[16 + position] >> sub_block & 1)
            values.append(half(block, 0) * scale * value - half(block, 2) * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    values = [0.0] * 256
    for part in range(2):
        low, high, scales = block[64 * part :], block[128 + 32 * part :], block[192 + 8 * part :]
        for i in range(32):
            numbers = (
                (low[i] & 15) | (high[i] & 3) << 4,
                (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4,
                (low[i] >> 4) | (high[i] >> 4 & 3) << 4,
                (low[i + 32] >> 4) | (high[i] >> 6 & 3) << 4,
            )
            for row, number in enumerate(numbers):
                scale = signed(scales[2 * row + i // 16])
                values[128 * part + 32 * row + i] = half(block, 208) * scale * (number - 32)
    return values


def bf16(block: bytes) -> list[float]:
    return [float(struct.unpack("<f", b"\0\0" + block)[0])]


DEFINITIONS: dict[str, Callable[[bytes], list[float]]] = {
    "F32": lambda block: [float(struct.unpack("<f", block)[0])],
    "F16": lambda block: [half(block, 0)],
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q5_0": q5_0,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
HALVES = {
    "F16": [0],
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
LIBRARY_ONLY = ["Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"]


def random_blocks(name: str, count: int) -> np.ndarray:
    """Random bytes, with finite scales where a block keeps them."""
    rng = np.random.default_rng(3)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    if name == "F32":
        return rng.normal(size=count).astype(np.float32).view(np.uint8).reshape(count, 4)
    if name == "BF16":
        return np.ascontiguousarray(rng.normal(size=count).astype(np.float32).view(np.uint8).reshape(count, 4)[:, 2:])
    blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    places = HALVES.get(name, range(0, size - size % 2, 2))
    for at in places:
        scales = (rng.normal(size=count) * 0.1).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def decoded(blocks: np.ndarray, name: str, dtype: torch.dtype) -> torch.Tensor:
    encoding = GGMLQuantizationType[name]
    out = torch.full((blocks.shape[0], GGML_QUANT_SIZES[encoding][0]), torch.nan, dtype=dtype)
    dequantize_into(torch.from_numpy(blocks.reshape(-1).copy()), encoding, out)
    return out


@pytest.mark.parametrize("name", DEFINITIONS)
def test_values_follow_the_definition(name: str) -> None:
    blocks = random_blocks(name, 24)
    exact = np.array([DEFINITIONS[name](block.tobytes()) for block in blocks])
    found = decoded(blocks, name, torch.float32).double().numpy()
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())
    rounded = decoded(blocks, name, torch.bfloat16)
    assert torch.equal(rounded, decoded(blocks, name, torch.float32).bfloat16())


@pytest.mark.parametrize("name", [*DEFINITIONS, *LIBRARY_ONLY])
def test_values_equal_the_gguf_library_to_the_bit_over_several_runs_of_blocks(name: str) -> None:
    """The sizes are chosen so that a tensor takes several runs and the last one is shorter."""
    block_elements = GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]
    blocks = random_blocks(name, (2 << 18) // block_elements + 7)
    expected = quants.dequantize(blocks, GGMLQuantizationType[name]).reshape(blocks.shape[0], -1)
    np.testing.assert_array_equal(decoded(blocks, name, torch.float32).numpy(), expected)


def test_an_encoding_that_nothing_decodes_is_refused() -> None:
    with pytest.raises(WeightsError, match="Q8_1"):
        decoded(np.zeros((2, 40), dtype=np.uint8), "Q8_1", torch.float32)
