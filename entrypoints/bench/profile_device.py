"""What `engine-bench profile` asks of the machine itself: how fast it reads and multiplies, and a clock on a GPU.

Ceilings are the best of many short repeats and of several ways, because all that can disturb such a measurement makes
it slower. They are taken in the run whose steps they are compared with: on a shared machine they move.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import torch

import engine.cpu_kernels
from attention_backends.native_build import NativeSources, Unit, build
from attention_backends.toolchain import BuildError
from engine.observability.step_work import Ceilings

LEAST_BUFFER_BYTES = 64 << 20
"""a smaller one would measure a cache that a step does not have to itself"""
MAIN_MEMORY_BUFFER_BYTES = 1 << 30
_MATRIX_SIZES = (1024, 2048)
_BITS = {"int8": 8, "bfloat16": 16, "float16": 16, "float32": 32}
_BUDGET_S = 0.25
"""of each figure, after a first run that is not timed"""


class CudaClock:
    """Events on the stream that is current when `stamp` is called; see `engine.observability.step_profile`."""

    def stamp(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record()
        return event

    def read(self, stamps: Sequence[object]) -> list[int]:
        events = [stamp for stamp in stamps if isinstance(stamp, torch.cuda.Event)]
        if len(events) != len(stamps):
            raise TypeError("stamps of another clock")
        if not events:
            return []
        events[-1].synchronize()
        since = [events[0].elapsed_time(event) for event in events[1:]]
        return [0, *(round(milliseconds * 1e6) for milliseconds in since)]


def measure_ceilings(
    device: torch.device, threads: int, weight_bytes: int, dtypes: Iterable[str], cache_dir: Path
) -> Ceilings:
    """With `threads` compute threads on a CPU. `dtypes`: torch's names, "int8" among them where weights are quantised.

    A few seconds; takes `MAIN_MEMORY_BUFFER_BYTES` of memory for the time being.
    """
    size = min(max(weight_bytes, LEAST_BUFFER_BYTES), MAIN_MEMORY_BUFFER_BYTES)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ways = _readers(device, threads, cache_dir)
        near = {name: _read_rate(read, size, device) for name, read in ways.items()}
        far = {name: _read_rate(read, MAIN_MEMORY_BUFFER_BYTES, device) for name, read in ways.items()}
        products = _products(device, {*dtypes})
    finally:
        torch.set_num_threads(before)
    best = max(near, key=lambda name: near[name])
    return Ceilings(
        read_bytes_per_s=near[best],
        main_memory_bytes_per_s=max(far.values()),
        ops_per_s=products,
        read_method=best,
        weights_bytes=size,
    )


def _products(device: torch.device, dtypes: set[str]) -> dict[str, float]:
    """A product of narrower numbers is at least as fast as one of wider numbers, whatever the library makes of it: a
    CPU that has none of 16 bits (AVX2) computes them as float32."""
    wanted = dtypes | {"float32"} if device.type == "cpu" else dtypes
    measured = {name: _multiply_rate(name, device) for name in wanted}
    rates: dict[str, float] = {}
    for name in dtypes:
        wider = [rate for other, rate in measured.items() if _BITS.get(other, 0) > _BITS.get(name, 32)]
        rates[name] = max([measured[name], *wider])
    return rates


def best_of(one: Ceilings, other: Ceilings) -> Ceilings:
    """The higher of each figure: two measurements of the same things."""
    faster = max(one, other, key=lambda ceilings: ceilings.read_bytes_per_s)
    return msgspec.structs.replace(
        faster,
        main_memory_bytes_per_s=max(one.main_memory_bytes_per_s, other.main_memory_bytes_per_s),
        ops_per_s={name: max(rate, other.ops_per_s[name]) for name, rate in one.ops_per_s.items()},
    )


def _readers(device: torch.device, threads: int, cache_dir: Path) -> dict[str, Callable[[torch.Tensor], object]]:
    ways: dict[str, Callable[[torch.Tensor], object]] = {"torch.sum": lambda x: x.sum()}
    if device.type == "cpu":
        ways["torch.dot"] = lambda x: torch.dot(x, x)
        try:
            probe = _probe(cache_dir)
        except BuildError:
            return ways  # no compiler: the library's readers are what there is
        ways["probe"] = lambda x: probe(x.data_ptr(), x.nbytes // 8, threads)
    return ways


def _probe(cache_dir: Path) -> Callable[[int, int, int], int]:
    """`csrc/read_probe.cpp`, compiled once on this machine. Raises BuildError."""
    source = Path(engine.cpu_kernels.__file__).parent / "csrc" / "read_probe.cpp"
    sources = NativeSources("bench_kernels", "pageloom_bench", (Unit(source),), headers=())
    function = ctypes.CDLL(str(build(sources, cache_dir).path)).pageloom_read
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_uint64
    return lambda address, words, threads: int(function(address, words, threads))


def _read_rate(read: Callable[[torch.Tensor], object], size_bytes: int, device: torch.device) -> float:
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    return buffer.nbytes / _fastest(lambda: read(buffer), device)


def _multiply_rate(dtype: str, device: torch.device) -> float:
    best = 0.0
    for size in _MATRIX_SIZES:
        if dtype == "int8":
            a = torch.randint(-8, 8, (size, size), dtype=torch.int8, device=device)
            # The library's int8 product is not part of torch's public names, and has been there since 2.0.
            seconds = _fastest(lambda a=a: torch._int_mm(a, a), device)  # type: ignore[misc]
        else:
            x = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
            seconds = _fastest(lambda x=x: x @ x, device)  # type: ignore[misc]
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > _BUDGET_S:
            break  # a slow path of the library (bfloat16 on a CPU without AVX-512): larger ones would take minutes
    return best


def _fastest(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of as many runs as fit into the budget, three at least; of one, if it exceeds it."""

    def once() -> float:
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = once()
    if first > _BUDGET_S:
        return first
    until = time.perf_counter() + _BUDGET_S
    best = min(once() for _ in range(3))
    while time.perf_counter() < until:
        best = min(best, once())
    return best
