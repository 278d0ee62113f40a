"""`compile_model`: from a module to a flat program of compiled pieces. Read this file first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from compilation.behind import check_stop
from compilation.errors import CompileError
from compilation.inductor import (
    compile_piece,
    inductor_directories,
    inductor_lock,
    inductor_options,
    load_piece,
    without_wrappers,
)
from compilation.interface import (
    BoundOps,
    CompiledModel,
    CompileReport,
    CompileSettings,
    FuseSteps,
    PieceFunction,
)
from compilation.key import KeyMaterial, environment_material, piece_material
from compilation.split import Piece, split
from compilation.stitch import stitch
from compilation.store import ArtifactStore
from compilation.structure import structural_hash
from compilation.toolchain import preparing, toolchain_directory
from compilation.trace import Traced, trace, value_of

log = logging.getLogger(__name__)

_ARTIFACT = "artifact.bin"
_LEAST_BOUND = 8192
"""tokens; bounds are powers of two from here on, so that settings that differ a little share artifacts"""


def compile_model(
    module: nn.Module,
    example_inputs: tuple[Tensor, ...],
    split_ops: frozenset[str],
    bind: BoundOps,
    settings: CompileSettings,
    stop: threading.Event | None = None,
    fuse: FuseSteps | None = None,
    fold: Callable[[Traced], None] | None = None,
) -> CompiledModel:
    """Compile `module` for every number of tokens (dimension 0 of all inputs; `example_inputs` may have any, 1
    included).

    Calls of `split_ops` ("namespace::name") become calls of the function bound under the same name, with the op's own
    arguments. Weights are held by reference: writes into them are seen, replacing a parameter object is not. Inputs of
    `run` must have the dtypes, devices, contiguity and trailing shapes of the examples. Mode "none" returns the module
    itself. `fold` may change the graph before it is split, `fuse` have steps of `run` computed together. Once `stop` is
    set, the compilation ends at its next part with CompileStoppedError (`compilation.behind`).

    Raises CompileError if the module cannot be traced, split or compiled, or if the cache directory is not trusted.
    """
    if settings.mode == "none":
        return CompiledModel(run=module, report=CompileReport(0, 0, 0, 0, 0.0))
    if set(bind) != split_ops:
        raise CompileError(f"split ops {sorted(split_ops)} and bound functions {sorted(bind)} must be the same names")
    start = time.perf_counter()
    with inductor_lock:
        store = ArtifactStore(settings.cache_dir)
        builder = _Builder(store, settings, example_inputs[0].device if example_inputs else torch.device("cpu"), stop)
        traced = builder.trace(module, example_inputs)
        if fold is not None:
            fold(traced)
        steps = split(traced, split_ops)
        pieces = [step for step in steps if isinstance(step, Piece)]
        kinds = {piece: structural_hash(piece.module.graph) for piece in pieces}
        distinct: dict[str, Piece] = {}
        for piece, kind in kinds.items():
            distinct.setdefault(kind, piece)
        samples = _Samples(traced, example_inputs)
        compiled = {kind: builder.build(piece, samples.of(piece)) for kind, piece in distinct.items()}
    functions = {piece: compiled[kind] for piece, kind in kinds.items()}
    program = stitch(traced, steps if fuse is None else fuse(traced, steps), functions, bind)
    run = program.run()
    seconds = time.perf_counter() - start
    report = CompileReport(len(pieces), len(distinct), builder.compiled, len(distinct) - builder.compiled, seconds)
    log.info("%s", report)
    return CompiledModel(run=run, report=report, rewire=program.rewire)


class _Builder:
    """Where one model's pieces come from: the store if it has them, Inductor otherwise."""

    def __init__(
        self, store: ArtifactStore, settings: CompileSettings, device: torch.device, stop: threading.Event | None
    ) -> None:
        self.compiled = 0
        self._stop = stop
        self._store = store
        self._options = inductor_options(settings.debug_asserts, device.type, settings.invariant)
        self._bound = None if settings.largest_size is None else _bound(settings.largest_size)
        self._toolchain = toolchain_directory(store.root) if device.type == "cpu" else None
        self._environment = {**environment_material(device, self._options), "bound": str(self._bound)}

    def trace(self, module: nn.Module, example_inputs: Sequence[Tensor]) -> Traced:
        """Dynamo's trace; on a CPU, the toolchain is made ready meanwhile."""
        check_stop(self._stop)
        if self._toolchain is None:
            return trace(module, example_inputs)
        with inductor_directories(self._toolchain, self._headers()), preparing(self._toolchain, self._stop):
            return trace(module, example_inputs)

    def build(self, piece: Piece, sample: list[Any]) -> PieceFunction:
        """Load the piece if a verified entry exists, else compile it and publish the entry."""
        check_stop(self._stop)
        material = piece_material(piece.module.graph, self._environment)
        with self._store.entry_lock(material) as path, inductor_directories(path / "inductor", self._headers()):
            function = None
            if self._store.is_valid(material):
                function = load_piece(path / _ARTIFACT, self._options, self._stop)
            if function is None:
                function = self._compile(piece, material)
            return without_wrappers(piece, function, sample)

    def _compile(self, piece: Piece, material: KeyMaterial) -> PieceFunction:
        path = self._store.discard(material)
        function = compile_piece(piece, self._options, path / _ARTIFACT, self._bound, self._stop)
        self._store.publish(material)
        self.compiled += 1
        return function

    def _headers(self) -> Path:
        return (self._toolchain or self._store.root) / "precompiled_headers"


def _bound(largest: int) -> int:
    return max(_LEAST_BOUND, 1 << (largest - 1).bit_length())


class _Samples:
    """Arguments `[size, *inputs]` for one run of a piece: true weights and inputs, invented activations."""

    def __init__(self, traced: Traced, example_inputs: Sequence[Tensor]) -> None:
        self._size = example_inputs[0].size(0)
        self._known: dict[fx.Node, Tensor] = dict(traced.weights)
        self._known.update({n: x for n, x in zip(traced.inputs, example_inputs, strict=True) if n is not None})

    def of(self, piece: Piece) -> list[Any]:
        tensors = [self._known[node] if node in self._known else self._invent(value_of(node)) for node in piece.inputs]
        return [self._size, *tensors]

    def _invent(self, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise CompileError(f"a piece reads a {type(value).__name__}, which is not a tensor")
        shape, stride = [[self._number(dim) for dim in dims] for dims in (value.shape, value.stride())]
        extent = 1 + sum((dim - 1) * step for dim, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        flat = torch.zeros(extent, dtype=value.dtype, device=value.device)
        if value.dtype.is_floating_point:
            flat.copy_((torch.arange(extent, device=value.device) % 7 - 3) / 4)
        return flat.as_strided(shape, stride)

    def _number(self, dim: int | torch.SymInt) -> int:
        if isinstance(dim, int):
            return dim
        expression = dim.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, self._size)))
