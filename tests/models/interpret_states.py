"""The kernels of states beside torch's operators. Run by test_state_kernels.py in a process of its own: Triton must be
imported with TRITON_INTERPRET=1 already set. On a GPU tools/gpu calls the same."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch

from engine.layer_groups import State
from engine.models.recurrence import recur
from engine.models.state_kernels import device_kernels
from engine.models.state_layers import StateStep, convolved
from engine.runner.state_caches import StateCaches
from engine.step import NO_WRITES

SHAPES = ((3, 6, 16, 16), (2, 2, 24, 80), (1, 4, 128, 128), (4, 4, 128, 40))
"""groups, heads, keys, values"""


def caches_of(sizes: list[int], pages: int, device: torch.device) -> tuple[StateCaches, list[torch.Tensor]]:
    """Of layers with states of so many bytes, in blocks of two caches."""
    layers: Any = [
        SimpleNamespace(facts=SimpleNamespace(state_bytes=lambda itemsize, size=size: size, taps=3)) for size in sizes
    ]
    states = StateCaches(layers, torch.float16, State(pages, 64))
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(-99, 99, (40, width), generator=generator, dtype=torch.int16) for width in (3000, 9000)]
    caches = [each.view(torch.float16).to(device) for each in drawn]
    states.allocate(caches)
    states.place([[3, 8, 5, 21], [17, 2, 30, 31], [9, 39, 1, 12]], NO_WRITES, 0)
    return states, caches


def check_move(device: torch.device) -> None:
    """Out of pages that lie anywhere, and back, as torch's indexing does both."""
    sizes = [40, 36_000, 12, 35_200]
    states, caches = caches_of(sizes, 4, device)
    plain, its_caches = caches_of(sizes, 4, device)
    plain._kernels = None
    if states._kernels is None:  # under the interpreter all is on the CPU
        states._kernels, states._pieces = device_kernels(), [states._pieces_of(runs) for runs in states._runs]
    firsts = torch.tensor([17, 3], device=device)
    for layer, size in enumerate(sizes):
        assert states.read(layer, firsts).equal(plain.read(layer, firsts)), f"layer {layer} is read otherwise"
        new = torch.randint(0, 256, (2, size), dtype=torch.uint8).to(device)
        for each in (states, plain):
            each.write(layer, firsts.flip(0), new)
        same = all(a.view(torch.int16).equal(b.view(torch.int16)) for a, b in zip(caches, its_caches, strict=True))
        assert same, f"layer {layer} is written otherwise"


def step_of(single: torch.Tensor, writes: int, kernels: Any) -> StateStep:
    nothing = torch.empty(0, dtype=torch.int64)
    written = torch.zeros(writes, dtype=torch.int64)
    return StateStep(nothing, nothing, nothing, nothing, written, nothing, single, [], nothing, nothing, kernels)


def check_one_token(device: torch.device) -> None:
    """What queries read, and the states, within float32's roundings."""
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    for groups, heads, keys, values in SHAPES:
        q, k, v = drawn(5, groups, keys), drawn(5, groups, keys) / keys**0.5, drawn(5, heads, values)
        state, beta = drawn(4, heads, keys, values), drawn(5, heads).sigmoid()
        single = torch.tensor([[2, 0, 3], [1, 4, 0], [2, 0, 1]], device=device)
        for decays in (1, keys):
            for rule in (beta, None):
                rates = -drawn(5, heads, decays).exp()
                given = (q, k, v, rates, rule, state)
                made, written = recur(step_of(single, 3, device_kernels()), *given)
                its_made, its_written = recur(step_of(single, 3, None), *given)
                torch.testing.assert_close(made, its_made, rtol=2e-5, atol=2e-5)
                torch.testing.assert_close(written, its_written, rtol=2e-5, atol=2e-5)


def check_convolve(device: torch.device) -> None:
    """Sums, of tokens of several sequences, with a bias and without."""
    generator = torch.Generator().manual_seed(3)
    for channels, taps in ((40, 4), (1100, 3)):
        given, state = (torch.randn(n, channels, generator=generator).to(device) for n in (7, 2 * (taps - 1)))
        before = taps - 1
        past = torch.tensor([list(range(before)), list(range(before + 3, 2 * before + 3))], device=device)
        own = [before + i if i < 3 else 2 * before + i for i in range(7)]
        step = step_of(torch.zeros(3, 0, dtype=torch.int64, device=device), 0, None)
        step = step._replace(past=past, own=torch.tensor(own, device=device), last=past)
        weight, bias = (torch.randn(channels, *shape, generator=generator).to(device) for shape in ((1, taps), ()))
        for added in (None, bias):
            args = (given, state.view(2, before, channels))
            expected = convolved(*args, step, weight, added)
            got = convolved(*args, step._replace(kernels=device_kernels()), weight, added)
            torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
            assert got[1].equal(expected[1])


CASES = {"convolve": check_convolve, "move": check_move, "one_token": check_one_token}

if __name__ == "__main__":
    from quick_interpreter import quicken

    quicken()
    for name in sys.argv[1:]:
        CASES[name](torch.device("cpu"))
        print(f"{name} right")
