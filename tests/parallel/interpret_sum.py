"""Run by test_device_group.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Triton's interpreter cuts float32 to bfloat16 instead of rounding, so sums are rounded to the two others here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from quick_interpreter import quicken
from rank_cases import SCALES

from engine.parallel.kernels import BLOCK, sum_on_host
from engine.parallel.kernels.device import sum_on_device


def main() -> None:
    quicken()
    torch.manual_seed(0)
    cases = [(size, count) for size in (1, 2, 3, 8) for count in (1, 7, BLOCK, BLOCK + 1, 2500)]
    for index, (size, count) in enumerate(cases):
        dtype, scale = (torch.float32, torch.float16)[index % 2], SCALES[index % len(SCALES)]
        for wide in (False, True):
            parts = (torch.randn(size, count) * scale).to(torch.float32 if wide else dtype)
            residual = torch.randn(count).to(dtype) if index % 3 else None
            got, expected = sum_on_device(parts, residual, dtype), sum_on_host(parts, residual, dtype)
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), (size, count, dtype, wide)
    print("same bits")


if __name__ == "__main__":
    main()
