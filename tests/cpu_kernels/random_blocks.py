"""Random blocks for tests: any bytes where any are valid, moderate numbers where float16 scales lie."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from engine.cpu_kernels.formats import FORMAT_OF_GGUF, Format

ENCODINGS = tuple(GGMLQuantizationType(number) for number in FORMAT_OF_GGUF)
HALVES = {  # first byte and number of the float16 in a block
    GGMLQuantizationType.Q4_0: (0, 1),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q5_0: (0, 1),
    GGMLQuantizationType.Q5_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0, 1),
    GGMLQuantizationType.Q2_K: (80, 2),
    GGMLQuantizationType.Q3_K: (108, 1),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208, 1),
    GGMLQuantizationType.IQ4_NL: (0, 1),
    GGMLQuantizationType.IQ4_XS: (0, 1),
}


def random_blocks(encoding: GGMLQuantizationType, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """uint8 [n, bytes of a row of k inputs]"""
    generator = torch.Generator().manual_seed(seed)
    inputs, size = GGML_QUANT_SIZES[encoding]
    blocks = torch.randint(0, 256, (n, k // inputs, size), dtype=torch.uint8, generator=generator)
    if encoding == GGMLQuantizationType.MXFP4:
        blocks[..., 0] = torch.randint(115, 125, blocks.shape[:2], generator=generator)
        return blocks.flatten(1)
    start, count = HALVES[encoding]
    halves = (torch.randn(n, k // inputs, count, generator=generator) * 0.01).half()
    blocks[..., start : start + 2 * count] = halves.view(torch.uint8)
    return blocks.flatten(1)


def random_weights(values: np.ndarray, encoding: GGMLQuantizationType) -> np.ndarray:
    """Random blocks of the encodings that the gguf library does not make, as large as weights are."""
    try:
        found: np.ndarray = quants.quantize(values, encoding)
    except NotImplementedError:
        blocks = random_blocks(encoding, *values.shape)
        start, count = HALVES[encoding]
        each = blocks.view(-1, GGML_QUANT_SIZES[encoding][1])
        numbers = each[:, start : start + 2 * count].contiguous().view(torch.float16)
        by = 0.06 / quants.dequantize(blocks.numpy(), encoding).std()
        each[:, start : start + 2 * count] = (numbers.float() * by).half().view(torch.uint8)
        found = blocks.numpy()
    return found


def block_of(format: Format) -> tuple[int, tuple[int, int]]:
    """Bytes of a block, and where its float16 numbers are."""
    encoding = _encoding_of(Format.Q4_1 if format is Format.INT4_GROUP else format)
    return GGML_QUANT_SIZES[encoding][1], HALVES[encoding]


def _encoding_of(format: Format) -> GGMLQuantizationType:
    return next(encoding for encoding in ENCODINGS if FORMAT_OF_GGUF[encoding] == format)


def blocks_of(format: Format, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """The same of any format that has blocks."""
    if format is Format.INT4_GROUP:
        blocks = random_blocks(GGMLQuantizationType.Q4_1, n, k, seed).view(n, k // 32, 20)
        zeros = torch.randint(0, 17, (n, k // 32, 1), generator=torch.Generator().manual_seed(k))
        blocks[..., 2:4] = zeros.half().view(torch.uint8)
        return blocks.flatten(1)
    if format in _OTHER_FLOATS:
        return _floats(format, n, k, seed)
    return random_blocks(_encoding_of(format), n, k, seed)


def _floats(format: Format, n: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k + seed)
    bytes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    totals = torch.rand(n, 1, generator=generator) * 1e-3 + 5e-4
    if format is Format.NVFP4:
        blocks = bytes[:, : k // 32 * 18].clone().view(n, k // 32, 18)
        scales = torch.rand(n, k // 32, 2, generator=generator).to(torch.float8_e4m3fn)
        blocks[..., :2] = scales.view(torch.uint8)
        return torch.cat((blocks.flatten(1), (totals * 1e5).view(torch.uint8)), dim=1)
    finite = torch.where(bytes & 127 == 127, bytes ^ 1, bytes)
    if format is Format.FLOAT8:
        return torch.cat((finite, totals.view(torch.uint8)), dim=1)
    scales = (torch.rand(n, k // 128, 1, generator=generator) * 1e-3).view(torch.uint8)
    return torch.cat((finite.view(n, k // 128, 128), scales), dim=2).flatten(1)


_OTHER_FLOATS = (Format.NVFP4, Format.FLOAT8, Format.FLOAT8_BLOCK)
FLOAT_FORMATS = (Format.MXFP4, *_OTHER_FLOATS)
BLOCK_FORMATS = (*FORMAT_OF_GGUF.values(), Format.INT4_GROUP, *_OTHER_FLOATS)
