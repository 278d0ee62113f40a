"""Random blocks for tests: any bytes where any are valid, moderate numbers where float16 scales lie."""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

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
    start, count = HALVES[encoding]
    halves = (torch.randn(n, k // inputs, count, generator=generator) * 0.01).half()
    blocks[..., start : start + 2 * count] = halves.view(torch.uint8)
    return blocks.flatten(1)


def block_of(format: Format) -> tuple[int, tuple[int, int]]:
    """Bytes of a block, and where its float16 numbers are."""
    encoding = _encoding_of(Format.Q4_1 if format is Format.INT4_GROUP else format)
    return GGML_QUANT_SIZES[encoding][1], HALVES[encoding]


def _encoding_of(format: Format) -> GGMLQuantizationType:
    return next(encoding for encoding in ENCODINGS if FORMAT_OF_GGUF[encoding] == format)


def blocks_of(format: Format, n: int, k: int) -> torch.Tensor:
    """The same of any format that has blocks."""
    if format is Format.INT4_GROUP:
        blocks = random_blocks(GGMLQuantizationType.Q4_1, n, k).view(n, k // 32, 20)
        zeros = torch.randint(0, 17, (n, k // 32, 1), generator=torch.Generator().manual_seed(k))
        blocks[..., 2:4] = zeros.half().view(torch.uint8)
        return blocks.flatten(1)
    return random_blocks(_encoding_of(format), n, k)


BLOCK_FORMATS = (*FORMAT_OF_GGUF.values(), Format.INT4_GROUP)
