"""What the FlashInfer backend uses of the package `flashinfer` and of the device, in one value that tests can replace.

The package is optional, large and slow to import, so nothing here imports it before `load_runtime`.

Facts (0.6.18 and 0.7.2, read from their sources) that the backend is built on:

- `plan` takes indptr, last_page_len and seq_lens on the host and copies them over without waiting; given on the device,
  each costs a synchronisation. Page indices go in on the device; planning never reads them.
- `plan` of the fa2 backend writes its schedule into pinned memory that belongs to the wrapper, then copies it to a
  workspace on the device asynchronously: hence `alternating_sets`.
- In graph mode everything that a captured run reads from the device lies at offsets fixed by the number of sequences,
  and what it passes by value (grid, offsets, scales) is fixed too. `disable_split_kv` is unsafe there: the padding
  blocks of the grid are masked only while splitting is on.
- Tensor-core decode handles any GQA group, and sequences without pages get zeros. Decode on CUDA cores knows the groups
  1, 2, 3, 4, 6, 8 only, and undercounts empty sequences when it sizes its schedule.
- fa2 takes `sinks` and ignores them. It reads K and V through their strides, and queries through theirs; the output
  must be contiguous. `v_scale` is a multiplication of the output by torch afterwards.
- 0.6 takes the maximum of seq_lens, element by element, in Python (0.3 ms for 256 sequences), and fa2 reads nothing
  else of it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from attention_backends.alternating_sets import Event
from attention_backends.page_kernels import PageKernels, select_kernels

DISTRIBUTION = "flashinfer-python"
MINIMUM_VERSION = (0, 6, 18)
MINIMUM_CAPABILITY = (8, 0)


class Wrapper(Protocol):
    """What the decode and the prefill wrapper have in common."""

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...


class DecodeWrapper(Wrapper, Protocol):
    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        non_blocking: bool,
        seq_lens: torch.Tensor,
    ) -> None: ...


class PrefillWrapper(Wrapper, Protocol):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
        non_blocking: bool,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None: ...


@dataclass(frozen=True)
class Runtime:
    """The wrappers' classes, and what the backend needs of the device."""

    make_decode: Callable[..., DecodeWrapper]
    make_prefill: Callable[..., PrefillWrapper]
    only_longest: bool
    """`plan` wants of seq_lens the maximum only, and computes it slowly: give it that one number"""
    device: torch.device
    multiprocessors: int
    kernels: PageKernels
    make_event: Callable[[], Event]
    capturing: Callable[[], bool]
    """whether the current stream is being captured, so that nothing may be planned"""


def why_missing() -> str | None:
    """Why FlashInfer cannot serve on this machine, or None. Imports nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"{DISTRIBUTION} is not installed"
    try:
        found = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"a module `flashinfer` is there, but the distribution {DISTRIBUTION} is not"
    if version_numbers(found) < MINIMUM_VERSION:
        return f"{DISTRIBUTION} is {found}, at least {'.'.join(map(str, MINIMUM_VERSION))} is needed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MINIMUM_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, at least 8.0 is needed"
    return None


def version_numbers(version: str) -> tuple[int, ...]:
    """`0.6.18.post1` -> (0, 6, 18)"""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def load_runtime(device: torch.device) -> Runtime:
    """Import FlashInfer (seconds) for `device`. Raises RuntimeError with the reason where that fails."""
    missing = why_missing()
    if missing is not None:
        raise RuntimeError(f"FlashInferBackend: {missing}")
    try:
        import flashinfer
    except (ImportError, OSError) as error:
        raise RuntimeError(f"FlashInferBackend: {DISTRIBUTION} does not import: {error}") from error
    return Runtime(
        make_decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        make_prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        only_longest=version_numbers(importlib.metadata.version(DISTRIBUTION)) < (0, 7),
        device=device,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        kernels=select_kernels(device),
        make_event=torch.cuda.Event,
        capturing=torch.cuda.is_current_stream_capturing,
    )
