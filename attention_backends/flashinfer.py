"""Paged attention by FlashInfer (optional, `pip install pageloom[cuda]`): planned on the host, a step ahead.

Its kernels serve shapes that the in-tree ones do not, and are a second opinion about those that both serve. What is
known of the library, and how its plans are kept from racing with the device: `flashinfer_library`, `alternating_sets`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from attention_backends.flashinfer_library import Runtime, Wrapper, load_runtime, why_missing
from attention_backends.flashinfer_plans import (
    LAYOUT,
    LIBRARY_BACKEND,
    PlanKind,
    Planner,
    Scratch,
    Step,
    workspace_bytes,
)
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec, Capabilities
from attention_backends.page_kernels import FP8, PageKernels

MAX_BLOCK_SIZE = 1024
_BUILD_BYTES = 1 << 20
_BUILD_HEADS = 8


class FlashInferBackend(AttentionBackend):
    """Decodes on the tensor-core decode wrapper, everything else on the prefill wrapper, both of the library's fa2.

    Contract beside the interface's:

    - `query_lens_host` and `seq_lens_host` are given; `build_metadata` and `forward` run on one stream (or are ordered
      as if they were), a step's `build_metadata` before its first `forward`.
    - A graph size is warmed up before it is captured: `forward` runs once for each layer, outside the capture, with
      metadata of that `graph_size`. There wrappers are made, kernels compiled, and kinds of layers (window, soft cap,
      scale) learned; `build_metadata` plans for every kind learned, since a replay calls no `forward`. A kind that
      first comes by during a capture is an error.
    - Sizes are best captured largest first: they share scratch memory, which grows for a larger size.
    - The library compiles with nvcc at first use and keeps the result in its own cache directory, unless its package of
      compiled kernels is installed.
    """

    name = "flashinfer"
    needs_host_lengths = True
    speed_rank = 20

    def __init__(self, runtime: Runtime | None = None) -> None:
        """`runtime`: stands for the library and the device (tests); None: loaded by `prepare`."""
        self._runtime = runtime
        self._spec: AttentionSpec | None = None
        self._scratch: Scratch | None = None
        self._planners: list[Planner] = []

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            head_dims=frozenset({64, 128, 256}),
            block_sizes=frozenset(range(16, MAX_BLOCK_SIZE + 1, 16)),
            kv_dtypes=frozenset({FP8}),
            window=True,
            soft_cap=True,
            sinks=False,
            capture_safe=True,
        )

    @classmethod
    def unavailable(cls, cache_dir: Path | None = None) -> str | None:
        return why_missing()

    def bind(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def prepare(self, cache_dir: Path | None = None) -> None:
        """Imports the library and, if `bind` said for what, compiles its kernels, in its own cache directory: it has no
        argument for another. Raises RuntimeError where one of both fails."""
        if self._runtime is None:
            device = torch.device("cuda") if self._spec is None else self._spec.device
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            self._runtime = load_runtime(device)
        if self._spec is not None:
            for head_dim in self._spec.head_dims:
                _build(self._runtime, self._spec, head_dim)
        self._scratch = Scratch(self._runtime.device)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim], as the in-tree CUDA backend has it."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def workspace_bytes(self, max_num_seqs: int, layers: Sequence[AttentionLayer], num_groups: int = 1) -> int:
        return workspace_bytes(max_num_seqs, layers, self._planner(0).multiprocessors, num_groups)

    def build_metadata(self, batch: AttentionBatch) -> Step:
        """Raises ValueError where the host's lengths are missing."""
        return self._planner(batch.group).begin(batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: object,
    ) -> None:
        """As the interface says. Raises ValueError for a layer with sinks: the library would drop them."""
        assert isinstance(metadata, Step)
        if layer.sinks is not None:
            raise ValueError("FlashInferBackend: fa2 ignores attention sinks; choose another backend")
        kind = PlanKind(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=metadata.block_size,
            dtype=q.dtype,
            kv_dtype=kv_cache.dtype,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
        )
        plan = self._planner(metadata.group).plan(metadata, kind)
        if layer.shares is None:
            self.write_kv(k, v, kv_cache, metadata.slot_mapping, layer.k_scale, layer.v_scale)
        decodes, tokens = metadata.num_decodes, metadata.num_decodes + metadata.num_prefill_tokens
        if plan.decode is not None:
            _run(plan.decode, q[:decodes], kv_cache, out[:decodes], layer)
        if plan.prefill is not None:
            _run(plan.prefill, q[decodes:tokens], kv_cache, out[decodes:tokens], layer)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self._kernels().write_kv(k, v, kv_cache, slot_mapping, k_scale, v_scale)

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """One launch for all caches whose blocks have one size. Raises ValueError for a block that is not there."""
        if not pairs or not kv_caches:
            return
        blocks = [block for pair in pairs for block in pair]
        if min(blocks) < 0 or max(blocks) >= min(cache.shape[0] for cache in kv_caches):
            raise ValueError(
                f"copy_blocks: a block in {list(pairs)} is outside a cache of {kv_caches[0].shape[0]} blocks"
            )
        device = kv_caches[0].device
        # A fresh pinned tensor each time: the caching allocator lends its memory again only after the copy.
        on_host = torch.tensor(pairs, dtype=torch.int64, pin_memory=device.type == "cuda")
        on_device = on_host.to(device, non_blocking=True)
        for caches in _by_block_bytes(kv_caches):
            self._kernels().copy_blocks(caches, on_device)

    def _planner(self, group: int) -> Planner:
        """One for each layer group: within a step, none of their plans may replace another's."""
        if self._scratch is None or self._runtime is None:
            raise RuntimeError("FlashInferBackend: prepare() loads the library; call it once before the first step")
        while len(self._planners) <= group:
            self._planners.append(Planner(self._runtime, self._scratch))
        return self._planners[group]

    def _kernels(self) -> PageKernels:
        if self._runtime is None:
            raise RuntimeError("FlashInferBackend: prepare() loads the kernels; call it once before the first step")
        return self._runtime.kernels


def _run(wrapper: Wrapper, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, layer: AttentionLayer) -> None:
    eight_bit = kv_cache.dtype == FP8
    k_scale, v_scale = (layer.k_scale, layer.v_scale) if eight_bit else (None, None)
    # The library takes the output's rows to follow one another without gaps, and does not check.
    packed = out.is_contiguous()
    result = wrapper.run(q, kv_cache, k_scale=k_scale, v_scale=v_scale, out=out if packed else None)
    if not packed:
        out.copy_(result)


def _by_block_bytes(kv_caches: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[int, list[torch.Tensor]] = {}
    for cache in kv_caches:
        groups.setdefault(cache.stride(0) * cache.element_size(), []).append(cache)
    return list(groups.values())


def _build(runtime: Runtime, spec: AttentionSpec, head_dim: int) -> None:
    """Plan one token for `spec`, which compiles what plain layers need, so that a missing compiler is known now."""
    workspace = torch.zeros(_BUILD_BYTES, dtype=torch.uint8, device=runtime.device)
    one = torch.ones(1, dtype=torch.int32)
    try:
        wrapper = runtime.make_decode(workspace, LAYOUT, use_tensor_cores=True, backend=LIBRARY_BACKEND)
        wrapper.plan(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32, device=runtime.device),
            one,
            _BUILD_HEADS,
            _BUILD_HEADS,
            head_dim,
            16,
            window_left=-1,
            logits_soft_cap=None,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
            sm_scale=1.0,
            non_blocking=True,
            seq_lens=one,
        )
    except (RuntimeError, ValueError, AssertionError, ImportError, OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"FlashInferBackend: the library does not build its kernels here: {error}") from error
