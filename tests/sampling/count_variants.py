"""Run by test_sampling_kernels.py in a process of its own: Triton compiles and "loads" the sampler's kernels as on a
GPU, for a driver that runs nothing, so what each launch specialises on can be seen on a CPU.

Prints for each vocabulary how many binaries warm-up loaded, and how many the batches after it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from device_parity import PARAMS
from load_triton_kernel import pretend_to_have_a_gpu

from compilation.counter import CompileCounter
from engine.sampling import Sampler
from engine.sampling.kernels.device import TritonKernels

CPU = torch.device("cpu")


def serve(sampler: Sampler, vocab: int, places: list[int]) -> None:
    """Steps of every size, of rows with and without filters, penalties and log-probabilities, at any address."""
    buffer = torch.zeros(2, 64, dtype=torch.int64)
    tokens = torch.zeros(64, 64, dtype=torch.int32)
    for row in range(len(PARAMS)):
        sampler.add(row, PARAMS[row], [1, 2, 3], 2)
    for shift in (0, 1):
        for first, last in pairwise(places):
            rows = list(range(first, last))
            index, positions = buffer[:, shift : shift + len(rows)]
            logits = torch.zeros(len(rows) + 1, vocab)[shift : shift + len(rows)]
            sampler.sample(logits, index, rows, positions, tokens)
        drafted = [row for row in range(len(PARAMS)) for _ in range(1 + row % 3)]
        index, positions = buffer[:, shift : shift + len(drafted)]
        logits = torch.zeros(len(drafted) + 1, vocab)[shift : shift + len(drafted)]
        sampler.sample(logits, index, drafted, positions, tokens)
        for k in (0, 1, 16, 40):
            sampler.prompt_logprobs(torch.zeros(3, vocab)[shift:], torch.zeros(4, dtype=torch.int64)[shift + 1 :], k)


def main() -> None:
    pretend_to_have_a_gpu()
    for vocab in (257, 4101):  # one chunk and several; rows after the first are aligned to nothing
        counter = CompileCounter()
        sampler = Sampler(64, vocab, CPU, 64, TritonKernels(vocab, CPU))
        sampler.warm_up()
        warm = counter.since_mark()
        counter.mark()
        serve(sampler, vocab, [0, 1, 3, 8, len(PARAMS)])
        serve(sampler, vocab, [0, len(PARAMS)])
        print(warm, counter.since_mark())


if __name__ == "__main__":
    main()
