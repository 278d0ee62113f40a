"""Finds attention backends and chooses one, saying of every other why it was not chosen: in the log, as a warning where
it was made for this kind of device and would have been faster, and in the error where none is left.

A backend from outside registers under the entry-point group `pageloom.attention_backends`; nothing here names it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import torch

from attention_backends.interface import AttentionBackend, AttentionSpec, Capabilities

logger = logging.getLogger(__name__)

GROUP = "pageloom.attention_backends"
# A source tree that is not installed has no entry points; its own backends are found all the same.
_IN_TREE = {
    "cpu": "attention_backends.cpu:CpuBackend",
    "cuda": "attention_backends.cuda:CudaBackend",
    "flashinfer": "attention_backends.flashinfer:FlashInferBackend",
    "reference": "attention_backends.reference:ReferenceBackend",
}
_NAMES = {
    "window": "sliding window",
    "soft_cap": "soft cap",
    "sinks": "attention sinks",
    "chunk": "chunked attention",
    "latent": "latent attention (MLA)",
    "context_parts": "decode context parallelism",
    "invariant": "sums that do not depend on the batch (batch_invariant)",
}
"""of what a layer may need, in `Capabilities`"""


class NoBackendError(ValueError):
    """No attention backend (or not the one asked for) can serve; the message gives the reason for each."""


@dataclass(frozen=True)
class Selection:
    backend: AttentionBackend
    """prepared: its kernels are loaded"""
    rejected: dict[str, str]
    """name of a backend -> why it cannot serve; backends that are merely slower are not in it"""


def registered() -> dict[str, EntryPoint]:
    """Name -> entry point. Loads nothing."""
    found = {name: EntryPoint(name, value, GROUP) for name, value in _IN_TREE.items()}
    found.update({point.name: point for point in entry_points(group=GROUP)})
    return found


def select(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dims: Sequence[int],
    block_size: int,
    needs_window: bool,
    needs_soft_cap: bool,
    name: str | None = None,
    cache_dir: Path | None = None,
    kv_dtype: torch.dtype | None = None,
    needs_sinks: bool = False,
    needs_chunk: bool = False,
    needs_latent: bool = False,
    needs_parts: bool = False,
    needs_invariant: bool = False,
) -> Selection:
    """The fastest backend that can serve, or the one called `name`, prepared (built kernels go under `cache_dir`).

    `head_dims`: of all layers that keep keys and values. `kv_dtype`: of the cache; None: `dtype`. Rejections are
    logged. Raises NoBackendError with every reason.
    """
    points, sizes, kind = registered(), tuple(sorted(set(head_dims))), torch.device(device).type
    needed = {"window": needs_window, "soft_cap": needs_soft_cap, "sinks": needs_sinks, "chunk": needs_chunk}
    needed |= {"latent": needs_latent, "context_parts": needs_parts, "invariant": needs_invariant}
    if name is not None and name not in points:
        raise NoBackendError(f"attention backend {name!r} is unknown; registered: {', '.join(sorted(points))}")
    rejected, elsewhere, ranks = dict[str, str](), set[str](), dict[str, int]()
    candidates: list[tuple[int, str, type[AttentionBackend]]] = []
    for each in sorted(points) if name is None else [name]:
        if (backend_class := _load(points[each], rejected)) is None:
            continue
        able, ranks[each] = backend_class.capabilities(), backend_class.speed_rank
        if kind not in able.devices or kind in backend_class.only_by_name:
            elsewhere.add(each)
        reasons = _refusals(able, device, dtype, sizes, block_size, needed)
        if kv_dtype not in (None, dtype) and kv_dtype not in able.kv_dtypes:
            reasons.append(f"has no {kv_dtype} KV cache")
        if name is None and kind in backend_class.only_by_name:
            reasons.append(f"serves {kind} only by name (attention_backend={each!r}): it is the oracle, and slow")
        if not reasons and (missing := backend_class.unavailable(cache_dir)) is not None:
            reasons.append(missing)
        if reasons:
            rejected[each] = "; ".join(reasons)
        else:
            candidates.append((backend_class.speed_rank, each, backend_class))
    for _, each, backend_class in sorted(candidates, key=lambda candidate: candidate[:2]):
        backend = backend_class()
        try:
            backend.bind(AttentionSpec(torch.device(device), dtype, kv_dtype or dtype, sizes, needs_invariant))
            backend.prepare(cache_dir)
        except Exception as error:  # whatever a backend from outside raises, the others may still serve
            rejected[each] = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            continue
        _log(each, rejected, elsewhere | {name for name, rank in ranks.items() if rank > ranks[each]})
        return Selection(backend, rejected)
    asked = "no attention backend can serve" if name is None else f"attention backend {name!r} cannot serve"
    lines = "".join(f"\n  {each}: {reason}" for each, reason in rejected.items())
    raise NoBackendError(
        f"{asked} {dtype} on {device} with head_dim {_summary(sizes)}, block_size {block_size}:{lines}"
    )


def _log(chosen: str, rejected: dict[str, str], expected: set[str]) -> None:
    """`expected`: those that would not be chosen anyway."""
    for each, reason in rejected.items():
        level = logging.DEBUG if each in expected else logging.WARNING
        logger.log(level, "attention backend %s cannot serve, %s does: %s", each, chosen, reason)


def _load(point: EntryPoint, rejected: dict[str, str]) -> type[AttentionBackend] | None:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        rejected[point.name] = f"{point.value} does not import: {error}"
        return None
    if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
        rejected[point.name] = f"{point.value} is not an AttentionBackend"
        return None
    return loaded


def _refusals(
    able: Capabilities,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dims: Sequence[int],
    block_size: int,
    needed: Mapping[str, bool],
) -> list[str]:
    reasons: list[str] = []
    kind = torch.device(device).type
    if kind not in able.devices:
        reasons.append(f"runs on {', '.join(sorted(able.devices))}, not on {kind}")
    if dtype not in able.dtypes:
        reasons.append(f"has no {dtype} (has {', '.join(sorted(map(str, able.dtypes)))})")
    if able.head_dims is not None and (others := set(head_dims) - able.head_dims):
        reasons.append(f"has no head_dim {_summary(others)} (has {_summary(able.head_dims)})")
    if able.block_sizes is not None and block_size not in able.block_sizes:
        reasons.append(f"has no block_size {block_size} (has {_summary(able.block_sizes)})")
    missing = [name for name, wanted in needed.items() if wanted and not getattr(able, name)]
    return reasons + [f"has no {_NAMES[name]}" for name in missing]


def _summary(sizes: Iterable[int]) -> str:
    ordered = sorted(sizes)
    if len(ordered) <= 8:
        return ", ".join(map(str, ordered))
    return f"{ordered[0]}, {ordered[1]}, ..., {ordered[-1]}"
