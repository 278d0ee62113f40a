"""Who computes a model's linear layers for few rows: a kernel of ours where it was measured to be faster, else the
library.

Decided once, before the model is traced, for each shape and bucket of rows, and kept in the cache directory: a shape is
computed by the same kernel at every start on this machine, so that its results do not change from start to start. A
kernel that fails here, or computes something else than the library, is out. What was timed is kept as a bandwidth, and
a choice whose bandwidth is implausible (`linear_doubts`) is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.nn import functional as F

from compilation.directory import trusted_directory
from compilation.store import locked, write_atomically
from engine.models.kernels import BUCKETS, SPLITS, TILES, LinearKernels, Plan, device_kernels, encode, plans_for
from engine.models.layers import Linear
from engine.models.linear_doubts import Measured, doubts
from engine.models.linear_op import FIXED
from engine.models.linear_timing import CudaTimer, LinearTimer

logger = logging.getLogger(__name__)

FORMAT = 2
LEAST_BYTES = 1 << 20
"""of weights, to be worth a choice: fewer are read in a fraction of a microsecond, and launches cost both the same"""
_MUST_GAIN = 0.97
"""a kernel of ours takes at most this much of the library's time, or the difference may be noise"""
_MAX_ERROR = 0.01
"""of a row, against the library's, in the Euclidean norm: bf16 rounds to 0.2 %"""
_L2_MULTIPLE = 4
_ATTEMPTS = 3
"""at timings that are plausible"""
_TILES = {tile.name: tile for tile in TILES}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    material: dict[str, str]
    copy_gb_per_s: float
    """the best that was seen beside the timings"""
    shapes: dict[str, dict[int, Measured]]
    sha256: str
    """of `shapes`"""


@dataclass(frozen=True)
class Shape:
    """Linear layers that are the same work."""

    n: int
    k: int
    has_bias: bool

    def __str__(self) -> str:
        return f"{self.n}x{self.k}{'+bias' if self.has_bias else ''}"

    @property
    def weight_bytes(self) -> int:
        return 2 * self.n * self.k


def choose_linears(
    model: nn.Module,
    cache_dir: Path,
    *,
    timer: LinearTimer | None = None,
    kernels: LinearKernels | None = None,
    material: dict[str, str] | None = None,
    least_bytes: int = LEAST_BYTES,
) -> None:
    """Set `choice` of every `Linear` in `model`: 16-bit, filled, on one CUDA device. Must precede tracing.

    Shapes of less than `least_bytes` of weights stay with the library, and what is `FIXED` as it is. Measures what the
    cache directory does not know yet, some 30 ms a shape and bucket, and loads the chosen kernels. `timer`, `kernels`
    and `material` (what a table depends on) take the place of the device's own. Raises CompileError if the cache
    directory is not trusted.
    """
    layers = {shape: same for shape, same in _by_shape(model).items() if shape.weight_bytes >= least_bytes}
    if not layers:
        return
    example = next(iter(layers.values()))[0].weight
    kernels = kernels or device_kernels()
    table = _Table(cache_dir, material or _material(example.device, example.dtype))
    started = time.perf_counter()
    with torch.inference_mode():
        measured = table.complete(layers, _Measurement(kernels, timer or CudaTimer(example.device)))
        for shape, linears in layers.items():
            plans = {rows: _plan(found) for rows, found in measured[shape].items()}
            for linear in linears:
                linear.choice = encode(plans)
            _load(linears[0], plans, kernels)
            logger.info("linear %s: %s", shape, _summary(shape, measured[shape]))
    logger.info("linear layers chosen in %.1f s", time.perf_counter() - started)
    if example.is_cuda:
        torch.cuda.empty_cache()


def _by_shape(model: nn.Module) -> dict[Shape, list[Linear]]:
    found: dict[Shape, list[Linear]] = {}
    for linear in model.modules():
        if (
            isinstance(linear, Linear)
            and linear.choice != FIXED
            and linear.weight.dtype in (torch.bfloat16, torch.float16)
        ):
            n, k = linear.weight.shape
            found.setdefault(Shape(n, k, linear.bias is not None), []).append(linear)
    # Kernels read 16 bytes at a time, and are compiled for rows that begin so.
    return {s: same for s, same in found.items() if all(_is_plain(linear.weight) for linear in same)}


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


class _Measurement:
    """Times one shape's candidates against the library."""

    def __init__(self, kernels: LinearKernels, timer: LinearTimer) -> None:
        self._kernels = kernels
        self._timer = timer

    def copy_gb_per_s(self) -> float:
        return self._timer.copy_gb_per_s()

    def of(self, shape: Shape, linears: Sequence[Linear], rows: int) -> Measured:
        wanted = max(2, -(-_L2_MULTIPLE * self._timer.l2_bytes // shape.weight_bytes))
        linears = linears[:wanted]  # together several times the L2, so that none is found there
        weight = linears[0].weight
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn(rows, shape.k, generator=generator, device=weight.device).to(weight.dtype)

        def library(i: int) -> torch.Tensor:
            return F.linear(x, linears[i].weight, linears[i].bias)

        copies, size_bytes = len(linears), shape.weight_bytes
        library_us = best_us = self._timer.median_us(library, copies, size_bytes)
        best: Plan | None = None
        for plan in plans_for(shape.n, shape.k, rows, self._timer.multiprocessors):

            def ours(i: int, plan: Plan = plan) -> torch.Tensor:
                return self._kernels.linear(x, linears[i].weight, linears[i].bias, plan)

            try:
                if not _agree(ours(0), library(0)):
                    logger.warning("linear %s, %d rows: %s computes something else; not used", shape, rows, plan)
                    continue
                us = self._timer.median_us(ours, copies, size_bytes)
            except self._kernels.failures as error:
                logger.info("linear %s, %d rows: %s cannot run: %s", shape, rows, plan, error)
                continue
            if us < best_us and us <= _MUST_GAIN * library_us:
                best, best_us = plan, us
        return Measured(
            tile=best.tile.name if best else None,
            splits=best.splits if best else 1,
            us=round(best_us, 3),
            library_us=round(library_us, 3),
            gb_per_s=round(size_bytes / best_us / 1e3, 3),
        )


def _agree(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Row by row, to rounding; False for NaN."""
    error = (ours.float() - expected.float()).norm(dim=1)
    return bool((error <= _MAX_ERROR * expected.float().norm(dim=1) + 1e-6).all())


class _Table:
    """What is known of this device, in one file of the cache directory. Verified when read; what does not fit is
    measured again."""

    def __init__(self, cache_dir: Path, material: dict[str, str]) -> None:
        self._material = {"format": str(FORMAT), "source": _own_source(), **material}
        name = hashlib.sha256(_canonical(self._material)).hexdigest()
        root = trusted_directory(cache_dir.absolute())
        self._path = trusted_directory(root / "linears") / f"{name}.json"

    def complete(
        self, layers: dict[Shape, list[Linear]], measurement: _Measurement
    ) -> dict[Shape, dict[int, Measured]]:
        """Under a lock, so that processes that start together measure once, and not each other. What stays implausible
        is used, and not kept: the next start measures again."""
        with locked(self._path):
            known, copy = self._read()
            doubted = doubts(known, copy)
            missing = [s for s in layers if not _is_complete(known.get(str(s))) or str(s) in doubted]
            measured = bool(missing)
            for attempt in range(_ATTEMPTS if missing else 0):
                copy = max(copy, measurement.copy_gb_per_s())
                for shape in missing:
                    known[str(shape)] = {rows: measurement.of(shape, layers[shape], rows) for rows in BUCKETS}
                doubted = doubts(known, copy)
                missing = [shape for shape in layers if str(shape) in doubted]
                for shape in missing:
                    level = logging.INFO if attempt + 1 < _ATTEMPTS else logging.WARNING
                    logger.log(level, "linear %s: implausible, to be timed again: %s", shape, doubted[str(shape)])
                if not missing:
                    break
            if measured:
                kept = {shape: rows for shape, rows in known.items() if shape not in doubted}
                write_atomically(self._path, self._text(kept, copy))
        return {shape: known[str(shape)] for shape in layers}

    def _read(self) -> tuple[dict[str, dict[int, Measured]], float]:
        """Shapes that fit this device and these kernels, and a copy's bandwidth."""
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError):
            return {}, 0.0
        if file.material != self._material or file.sha256 != _checksum(file.shapes):
            return {}, 0.0
        return {shape: rows for shape, rows in file.shapes.items() if rows}, file.copy_gb_per_s

    def _text(self, shapes: dict[str, dict[int, Measured]], copy_gb_per_s: float) -> str:
        file = _File(material=self._material, copy_gb_per_s=copy_gb_per_s, shapes=shapes, sha256=_checksum(shapes))
        return msgspec.json.format(msgspec.json.encode(file)).decode()


def _is_complete(entry: dict[int, Measured] | None) -> bool:
    """A choice for every bucket, of plans that exist."""
    if entry is None or set(entry) != set(BUCKETS):
        return False
    return all(f.splits in SPLITS and (f.tile is None or f.tile in _TILES) for f in entry.values())


def _plan(found: Measured) -> Plan | None:
    return None if found.tile is None else Plan(_TILES[found.tile], found.splits)


def _load(linear: Linear, plans: dict[int, Plan | None], kernels: LinearKernels) -> None:
    """Run the chosen kernels once, so that none is compiled or loaded while serving."""
    for rows, plan in plans.items():
        if plan is not None:
            x = torch.zeros(rows, linear.weight.shape[1], dtype=linear.weight.dtype, device=linear.weight.device)
            kernels.linear(x, linear.weight, linear.bias, plan)


def _summary(shape: Shape, measured: dict[int, Measured]) -> str:
    def library(found: Measured) -> int:
        return round(shape.weight_bytes / max(found.library_us, 1e-3) / 1e3)

    return "; ".join(
        f"{rows} rows {_plan(found) or 'library'} {round(found.gb_per_s)} GB/s (library {library(found)})"
        for rows, found in measured.items()
    )


def _canonical(value: object) -> bytes:
    return json.dumps(msgspec.to_builtins(value, str_keys=True), sort_keys=True).encode()


def _checksum(shapes: dict[str, dict[int, Measured]]) -> str:
    return hashlib.sha256(_canonical(shapes)).hexdigest()


def _own_source() -> str:
    """Hash of the kernels' files: what they compute, and how fast, is what the table is about."""
    hasher = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


def _material(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name} {properties.major}.{properties.minor} {properties.multi_processor_count}",
        "torch": f"{torch.__version__} {torch.version.git_version} {torch.version.cuda}",
        "triton": str(triton.__version__),
        "dtype": str(dtype),
    }
