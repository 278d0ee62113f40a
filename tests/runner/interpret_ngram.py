"""Run by test_ngram.py in a process of its own: Triton must be imported with TRITON_INTERPRET=1 already set.

Prints how many drafts were compared; raises at the first that differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from ngram_oracle import check_ngram, random_case
from quick_interpreter import quicken

from engine.runner.kernels.ngram_device import TritonDraftKernels


def main() -> None:
    quicken()
    rng = np.random.default_rng(0)
    drafts = 0
    for index in range(24):
        small = TritonDraftKernels(block=int(rng.choice([4, 16])), parts=int(rng.choice([1, 2, 8])))
        drafts += check_ngram(TritonDraftKernels() if index % 6 == 5 else small, random_case(rng, num_rows=5))
    print("drafts", drafts)


if __name__ == "__main__":
    main()
