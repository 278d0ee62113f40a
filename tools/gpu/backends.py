"""Attention backends by name and kind of attention."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from attention_backends.interface import AttentionBackend, AttentionSpec, Capabilities
from attention_backends.registry import registered
from gpu.context import Context, UnavailableError

NATIVE = ("cuda", "flashinfer")
BUILDERS = 6
"""kernels of so many kinds are compiled at a time; each compile has several processes of its own"""
FP8 = torch.float8_e4m3fn


def spec_of(
    context: Context, head_dim: int, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None
) -> AttentionSpec:
    return AttentionSpec(context.device.torch_device, dtype, kv_dtype or dtype, (head_dim,))


class Backends:
    """One backend per kind of attention, prepared once. Raises UnavailableError where this machine cannot have it."""

    def __init__(self, context: Context, name: str) -> None:
        self.name = name
        self._context = context
        self._pool: ThreadPoolExecutor | None = None
        self._made: dict[AttentionSpec, Future[AttentionBackend]] = {}
        self._class: type[AttentionBackend] = _class_named(name, context.cache_dir)

    def prefetch(self, specs: Iterable[AttentionSpec]) -> None:
        """Prepare these side by side, the first first, while others are used."""
        if self.name == "cuda":
            self._pool = self._pool or ThreadPoolExecutor(1 if self._context.dry else BUILDERS)
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
        """Builds nothing."""
        return self._class.capabilities()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, spec: AttentionSpec) -> AttentionBackend:
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


def build(context: Context, name: str) -> None:
    """Parts `build-cuda` and `build-flashinfer`: what the models of the suite use, so that no later part waits for a
    compiler."""
    backends = Backends(context, name)
    kinds = [(64, None)] if context.dry else [(128, None), (64, None), (128, FP8)]
    specs = [spec_of(context, head_dim, kv_dtype=kv_dtype) for head_dim, kv_dtype in kinds]
    backends.prefetch(specs)
    for spec in specs:
        backend = backends.get(spec)
        context.figure("built", {"backend": backend.name, "head_dims": spec.head_dims, "kv": str(spec.kv_dtype)})
    backends.close()
