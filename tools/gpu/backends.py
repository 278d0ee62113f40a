"""Attention backends by name and kind of attention; in a dry run, the nearest thing that a CPU has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from attention_backends.interface import AttentionBackend, AttentionSpec, Capabilities
from attention_backends.reference import ReferenceBackend
from attention_backends.registry import registered
from gpu.context import ROOT, Context, UnavailableError, load_test_module

NATIVE = ("cuda", "flashinfer")
BUILDERS = 6
"""kernels of so many kinds are compiled at a time; each compile has several processes of its own"""
FP8 = torch.float8_e4m3fn


def spec_of(
    context: Context, head_dim: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> AttentionSpec:
    return AttentionSpec(context.device.torch_device, dtype, kv_dtype or dtype, head_dim)


class Backends:
    """One backend per kind of attention, prepared once. Raises UnavailableError where this machine cannot have it."""

    def __init__(self, context: Context, name: str) -> None:
        self.name = name
        self._context = context
        self._pool: ThreadPoolExecutor | None = None
        self._made: dict[AttentionSpec, Future[AttentionBackend]] = {}
        self._class: type[AttentionBackend] = ReferenceBackend if context.dry else _class_named(name, context.cache_dir)

    def prefetch(self, specs: Iterable[AttentionSpec]) -> None:
        """Prepare these side by side, the first first, while others are used."""
        if self.name == "cuda" and not self._context.dry:
            self._pool = self._pool or ThreadPoolExecutor(BUILDERS)
            for spec in specs:
                if spec not in self._made:
                    self._made[spec] = self._pool.submit(self._prepared, spec)

    def get(self, spec: AttentionSpec) -> AttentionBackend:
        """Waits until it is prepared. Raises RuntimeError where that failed."""
        if spec not in self._made:
            self._made[spec] = Future()
            try:
                self._made[spec].set_result(self._prepared(spec))
            except Exception as error:
                self._made[spec].set_exception(error)
        return self._made[spec].result()

    def capabilities(self) -> Capabilities:
        """Of the backend that stands for it in a dry run, too; builds nothing."""
        return self._class.capabilities()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, spec: AttentionSpec) -> AttentionBackend:
        if self._context.dry:
            return _stand_in(self._context, self.name, spec)
        backend: AttentionBackend = self._class()
        backend.bind(spec)
        backend.prepare(self._context.cache_dir)
        return backend


def _class_named(name: str, cache_dir: Path) -> type[AttentionBackend]:
    points = registered()
    if name not in points:
        raise UnavailableError(f"attention backend {name!r} is not registered (has {', '.join(sorted(points))})")
    try:
        found: type[AttentionBackend] = points[name].load()
    except (ImportError, AttributeError) as error:
        raise UnavailableError(f"{points[name].value} does not import: {error}") from error
    reason = found.unavailable(cache_dir)
    if reason is not None:
        raise UnavailableError(reason)
    return found


def _stand_in(context: Context, name: str, spec: AttentionSpec) -> AttentionBackend:
    """The in-tree kernels under the tests' emulator, where a C++ compiler can build it; else, and for FlashInfer, the
    reference."""
    if name == "cuda":
        try:
            return _emulated(context, spec)
        except (UnavailableError, ImportError, AttributeError, RuntimeError, OSError) as error:
            context.skipped("cuda under the emulator", f"{type(error).__name__}: {error}")
    return ReferenceBackend()


def _emulated(context: Context, spec: AttentionSpec) -> AttentionBackend:
    """Compiled once for these sources; later parts find the library."""
    from attention_backends.cuda import CudaBackend

    emulator = load_test_module("attention_backends", "emulated_cuda")
    digest = hashlib.sha256()
    for folder in (ROOT / "attention_backends" / "csrc" / "cuda", ROOT / "tests" / "attention_backends"):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp")):
            digest.update(path.read_bytes())
    folder = context.cache_dir / f"emulator_{digest.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(spec.dtype).removeprefix("torch.")
    built = folder / f"kernels_{spec.head_dim}_{dtype}_{int(spec.kv_dtype == FP8)}.so"
    key = (spec.head_dim, spec.dtype, spec.kv_dtype)
    if built.is_file():
        launchers = emulator.EmulatedLaunchers(emulator.EmulatedLibrary(built), *key)
    else:
        launchers = emulator.kernels_in(folder)(*key)
    backend = CudaBackend(launchers, multiprocessors=4)
    backend.bind(spec)
    backend.prepare()
    return backend


def build(context: Context, name: str) -> None:
    """Parts `build-cuda` and `build-flashinfer`: what the models of the suite use, so that no later part waits for a
    compiler."""
    backends = Backends(context, name)
    kinds = [(64, None)] if context.dry else [(128, None), (64, None), (128, FP8)]
    specs = [spec_of(context, head_dim, kv_dtype=kv_dtype) for head_dim, kv_dtype in kinds]
    backends.prefetch(specs)
    for spec in specs:
        backend = backends.get(spec)
        context.figure("built", {"backend": backend.name, "head_dim": spec.head_dim, "kv": str(spec.kv_dtype)})
    backends.close()
