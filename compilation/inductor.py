"""The only file that talks to Inductor: where it writes, how a piece is compiled, saved, loaded, and called without
wrappers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CellType
from typing import Any

import torch
from torch import Tensor, fx

from compilation.behind import check_stop
from compilation.errors import CompileError, in_short
from compilation.interface import PieceFunction
from compilation.split import Piece, storage_of
from compilation.trace import value_of

log = logging.getLogger(__name__)

inductor_lock = threading.RLock()
"""Inductor's directories and settings belong to the process: one compilation at a time, whoever asks."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@contextmanager
def inductor_directories(kernels: Path, headers: Path) -> Iterator[None]:
    """Within, Inductor's cache is in `kernels` and its precompiled headers are in `headers`."""
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    attributes = {"_HEADER_DIR": str(headers), "_HEADER_LOCK_DIR": str(headers / "locks")}
    before = {name: getattr(codecache, name) for name in attributes if hasattr(codecache, name)}
    try:
        for name in before:
            setattr(codecache, name, attributes[name])
        with temporary_cache_dir(str(kernels)):
            yield
    finally:
        for name, value in before.items():
            setattr(codecache, name, value)


def inductor_options(debug_asserts: bool, device_type: str, invariant: bool = False) -> dict[str, object]:
    """Settings under which pieces are compiled; part of the key. `invariant`: as of `CompileSettings`."""
    options: dict[str, object] = {
        "size_asserts": debug_asserts,
        "alignment_asserts": debug_asserts,
        "scalar_asserts": debug_asserts,
        "freezing": False,  # would bake weights into the code
        "triton.cudagraphs": False,  # capture is graphs/'s own
    }
    if device_type == "cpu":
        # Code for any number of tokens would wake OpenMP's threads for one token as for a thousand, and they spin for
        # milliseconds afterwards, on the cores where layers and attention compute with threads of their own.
        options["cpp.threads"] = 1
    if device_type == "cuda":
        options |= {
            # A model has a few dozen kernels: they are compiled before a pool of workers, a process for every core,
            # has imported torch; and no pool stays behind.
            "compile_threads": 1,
            # standalone_compile would time kernels on invented tensors: the whole embedding table again, on a device
            # that the KV cache has filled. Kernels that have a choice make it at their first run, on `sample`.
            "triton.autotune_at_compile_time": False,
            # Makes `residual + linear(x)` an addmm, which copies the residual and then adds to the copy; left alone,
            # the addition costs nothing, because it is fused into the normalisation that follows.
            "pattern_matcher": False,
        }
    if invariant and device_type == "cuda":
        # How a reduction is cut is not chosen by timing, nor by a number of rows.
        options |= {
            name: True for name in ("deterministic", "batch_invariant") if hasattr(torch._inductor.config, name)
        }
    return options


def compile_piece(
    piece: Piece,
    options: dict[str, object],
    artifact: Path,
    largest: int | None,
    stop: threading.Event | None = None,
) -> PieceFunction:
    """Compile for up to `largest` tokens (None: any number) and save to `artifact`. Raises CompileError with Inductor's
    reason, unless that is because of `stop`."""
    compiled = None if largest is None else _compile_bounded(piece, options, largest, stop)
    try:
        if compiled is None:
            compiled = _compile(piece.module, options)
        compiled.save(path=str(artifact))
    except Exception as error:
        check_stop(stop)  # its compiler was ended
        raise CompileError(f"Inductor cannot compile a piece; use mode none. {in_short(error)}") from error
    return _boxed(compiled)


def _compile_bounded(piece: Piece, options: dict[str, object], largest: int, stop: threading.Event | None) -> Any:
    """None where that is not possible: code for any number of tokens is slower, but serves."""
    from compilation.bounded import Bounded

    bounded = Bounded(piece.module, largest)
    try:
        compiled = _compile(bounded.module, options)
    except Exception as error:
        check_stop(stop)
        log.warning("a piece is compiled without a bound of tokens: %s", in_short(error))
        return None
    if not bounded.holds():
        log.warning("a piece is compiled without a bound of tokens: its code would not serve all up to %d", largest)
        return None
    return compiled


def _compile(module: fx.GraphModule, options: dict[str, object]) -> Any:
    from torch._inductor import standalone_compile

    examples: list[Any] = [value_of(node) for node in module.graph.find_nodes(op="placeholder")]
    patches: dict[str, Any] = {"config_patches": options}  # standalone_compile has settings of its own: ours are within
    with torch.inference_mode(False), torch.no_grad(), torch._inductor.config.patch(options):
        return standalone_compile(module, examples, dynamic_shapes="from_graph", aot=True, options=patches)


def load_piece(artifact: Path, options: dict[str, object], stop: threading.Event | None = None) -> PieceFunction | None:
    """Load what `compile_piece` saved; None if torch refuses it, unless that is because of `stop`. Runs code of the
    file: verify it first."""
    from torch._inductor.standalone_compile import CompiledArtifact

    try:
        with torch.inference_mode(False), torch.no_grad(), torch._inductor.config.patch(options):
            return _boxed(CompiledArtifact.load(path=str(artifact)))
    except Exception as error:
        check_stop(stop)  # its compiler was ended
        log.warning(
            "compiled piece %s cannot be loaded and is compiled again: %s", artifact.parent.name, in_short(error)
        )
        return None


def _boxed(compiled: Callable[..., Any]) -> PieceFunction:
    return _Boxed(compiled)


class _Boxed:
    """An artifact behind the boxed convention, with all of torch's wrappers."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = self.compiled(*arguments)
        return outputs


def without_wrappers(piece: Piece, function: PieceFunction, sample: list[Any]) -> PieceFunction:
    """Inductor's generated `call` itself, if it does the same as the artifact around it; else `function`.

    The wrappers (AOTAutograd's runtime wrapper, profiler hooks, metrics: 5 µs a piece) do nothing for a piece that
    writes none of its inputs and returns no view of them. Where the generated code sits inside the artifact is torch's
    private matter, so it is searched, and believed only if it returns the very same values for `sample` ([size,
    *inputs]).
    """
    if not isinstance(function, _Boxed) or _returns_input_views(piece):
        return function
    compiled = _find_compiled_graph(function.compiled, set(), 0)
    if compiled is None or compiled.mutated_input_idxs or compiled.current_callable is None:
        return function
    direct: PieceFunction = compiled.current_callable
    with torch.inference_mode(False), torch.no_grad():
        expected = function(list(sample))
        found = direct(list(sample))
    if len(found) == len(expected) == len(piece.outputs) and all(map(_same, piece.outputs, found, expected)):
        return _KeepAlive(direct, compiled).call
    log.info("a piece keeps torch's wrappers: its generated code differs from its artifact")
    return function


class _KeepAlive:
    """CompiledFxGraph empties its runner when it dies, so whoever holds the callable must hold the graph."""

    def __init__(self, call: PieceFunction, owner: object) -> None:
        self.call = call
        self.owner = owner


def _returns_input_views(piece: Piece) -> bool:
    sources = {storage_of(node) for node in piece.inputs}
    return any(storage_of(node) in sources for node in piece.outputs)


def _find_compiled_graph(holder: object, seen: set[int], depth: int) -> Any:
    """Depth-first through closures and attributes of callables, to the CompiledFxGraph inside an artifact."""
    from torch._inductor.output_code import CompiledFxGraph

    if isinstance(holder, CompiledFxGraph):
        return holder
    if depth > 12 or id(holder) in seen:
        return None
    seen.add(id(holder))
    cells = getattr(holder, "__closure__", None) or ()
    inner = [*map(_contents, cells), *getattr(holder, "__dict__", {}).values()]
    inner.append(getattr(holder, "__self__", None))
    for candidate in inner:
        if callable(candidate) and not isinstance(candidate, type):
            found = _find_compiled_graph(candidate, seen, depth + 1)
            if found is not None:
                return found
    return None


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # never filled, as one of torch 2.11's is
        return None


def _same(node: torch.fx.Node, found: object, expected: object) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return found is expected
    if (found.dtype, found.shape, found.stride()) != (expected.dtype, expected.shape, expected.stride()):
        return False
    name = getattr(node.target, "__name__", str(node.target))
    return name in _UNINITIALISED or torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
