"""Random GGUF blocks for tests: any bytes where any are valid, moderate numbers where float16 scales lie."""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

ENCODINGS = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)
_HALVES = {  # first byte and number of the float16 in a block
    GGMLQuantizationType.Q4_0: (0, 1),
    GGMLQuantizationType.Q4_1: (0, 2),
    GGMLQuantizationType.Q8_0: (0, 1),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208, 1),
}


def random_blocks(encoding: GGMLQuantizationType, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """uint8 [n, bytes of a row of k inputs]"""
    generator = torch.Generator().manual_seed(seed)
    inputs, size = GGML_QUANT_SIZES[encoding]
    blocks = torch.randint(0, 256, (n, k // inputs, size), dtype=torch.uint8, generator=generator)
    start, count = _HALVES[encoding]
    halves = (torch.randn(n, k // inputs, count, generator=generator) * 0.01).half()
    blocks[..., start : start + 2 * count] = halves.view(torch.uint8)
    return blocks.flatten(1)
