"""Paged attention on NVIDIA GPUs: a thin shell around the in-tree CUDA kernels (`csrc/cuda/launch.h`).

No plan is made on the host: a decode's split is decided on the device (`schedule_decode`, once a step for each distinct
window), grids depend on counts only, and every launch may be captured. One op call per layer writes the step's keys and
values and attends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attention_backends import cuda_latents
from attention_backends.cuda_blocks import BlockMover
from attention_backends.cuda_build import CudaKernels, build, find_cached, find_nvcc
from attention_backends.cuda_launchers import Launchers, OpLaunchers
from attention_backends.cuda_plan import LayerPlan, Workspace, plan_layer, workspace_bytes
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec, Capabilities
from attention_backends.toolchain import default_cache_dir

MIN_CAPABILITY = (8, 0)
_ANY_HEAD_DIM = 64
"""Where all layers keep latents, kernels are built for it nonetheless: they move blocks."""
_LayerKey = tuple[int, int, int, int]


@dataclass(slots=True)
class CudaMetadata:
    """One step. How layers of a kind are launched is settled at the first of them: windows are theirs."""

    batch: AttentionBatch
    plans: dict[_LayerKey, LayerPlan] = field(default_factory=dict)


class CudaBackend(AttentionBackend):
    """bfloat16 and float16 queries; caches of that type or float8 e4m3. Sums in float32.

    Kernels are compiled for what `bind` says, a library for each size of head, at the first `prepare` on a machine
    (about a minute), and cached. Latents are attended to by kernels that Triton compiles (`cuda_latents`).
    `launchers`, `multiprocessors`: kernels that are there already, and how many processors to cut work for (tests).
    """

    name = "cuda"
    speed_rank = 10

    def __init__(self, launchers: Launchers | None = None, multiprocessors: int = 0) -> None:
        self._given = launchers
        self._multiprocessors = multiprocessors
        self._spec: AttentionSpec | None = None
        self._ready: _Ready | None = None
        self._invariant = False

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            kv_dtypes=frozenset({torch.float8_e4m3fn}),
            head_dims=frozenset({64, 96, 128, 256}),
            block_sizes=frozenset({16, 32, 64, 128, 256}),
            window=True,
            soft_cap=True,
            sinks=True,
            chunk=True,
            latent=True,
            invariant=True,
            capture_safe=True,
        )

    @classmethod
    def unavailable(cls, cache_dir: Path | None = None) -> str | None:
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        if (have := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
            return f"needs compute capability 8.0 or more; this device has {have[0]}.{have[1]}"
        cache_dir = cache_dir or default_cache_dir()
        if find_nvcc() is None and not find_cached(cache_dir):
            return f"no CUDA compiler (nvcc) on PATH or in /usr/local/cuda, and no built kernels under {cache_dir}"
        return None

    def bind(self, spec: AttentionSpec) -> None:
        self._invariant = spec.invariant
        self._spec = replace(spec, head_dims=spec.head_dims or (_ANY_HEAD_DIM,))
        if self._given is not None:
            self._ready = _Ready(dict.fromkeys(self._spec.head_dims, self._given), spec.device, self._multiprocessors)

    def prepare(self, cache_dir: Path | None = None) -> None:
        """Builds (once per machine and spec), loads and tries the kernels. Raises BuildError; RuntimeError before
        `bind`, or where they do not run (a driver older than the compiler)."""
        if self._spec is None:
            raise RuntimeError("CudaBackend: bind() says what to build; call it before prepare()")
        if self._given is not None:
            return
        device = self._spec.device
        capability = torch.cuda.get_device_capability(device)
        launchers: dict[int, Launchers] = {}
        for head_dim in self._spec.head_dims:
            kernels = CudaKernels(head_dim, self._spec.dtype, self._spec.kv_dtype, capability)
            library = build(cache_dir or default_cache_dir(), kernels)
            if not hasattr(getattr(torch.ops, library.namespace), "attend"):
                torch.ops.load_library(str(library.path))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            launchers[head_dim] = OpLaunchers(library.namespace)
        processors = self._multiprocessors or torch.cuda.get_device_properties(device).multi_processor_count
        self._ready = _Ready(launchers, device, processors)
        for head_dim in launchers:
            self._try_out(self._spec, head_dim)

    def _try_out(self, spec: AttentionSpec, head_dim: int) -> None:
        """One token that sees itself: its output is its value. Outside any step, so it may wait for the device."""
        q = torch.ones(1, 1, head_dim, dtype=spec.dtype, device=spec.device)
        out = torch.zeros_like(q)
        cache = torch.zeros(self.kv_cache_shape(1, 16, 1, head_dim), dtype=spec.kv_dtype, device=spec.device)
        ints = torch.tensor([0, 1], dtype=torch.int32, device=spec.device)
        slot, table = ints[:1].long(), torch.zeros(1, 1, dtype=torch.int32, device=spec.device)
        for longest in (1, 2):  # decode, then prefill
            batch = AttentionBatch(1, 1, longest, 1, ints, ints[1:], table, slot, 16, 0, (1,), (1,))
            layer = AttentionLayer(1, 1, head_dim, head_dim**-0.5)
            self.forward(q, q, q, out, cache, layer, self.build_metadata(batch))
            if not torch.equal(out, q):
                raise RuntimeError(
                    f"CudaBackend: the kernels compute nonsense on {spec.device}; is the driver recent enough?"
                )
            out.zero_()

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim]: a page of one head is contiguous."""
        return (num_blocks, 2, num_kv_heads, block_size, head_dim)

    def latent_cache_shape(self, num_blocks: int, block_size: int, row_size: int) -> tuple[int, ...]:
        return (num_blocks, block_size, row_size)

    def workspace_bytes(self, max_num_seqs: int, layers: Sequence[AttentionLayer], num_groups: int = 1) -> int:
        """Groups share it: what a launch leaves there the next one of the stream does not need."""
        plain, processors = [layer for layer in layers if layer.latent is None], self._prepared().multiprocessors
        parts = 0 if self._invariant else workspace_bytes(max_num_seqs, plain, processors)
        return parts + cuda_latents.workspace_bytes(layers, processors)

    def build_metadata(self, batch: AttentionBatch) -> CudaMetadata:
        return CudaMetadata(batch)

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
        assert isinstance(metadata, CudaMetadata)
        ready, batch = self._prepared(), metadata.batch
        if layer.latent is not None:
            if layer.shares is None:
                cuda_latents.write_rows(k, kv_cache, batch.slot_mapping, batch.num_tokens)
            cuda_latents.attend(q, out, kv_cache, layer, layer.latent, batch, ready.multiprocessors)
            return
        window = layer.signed_window
        key = (window, layer.num_heads, layer.num_kv_heads, layer.head_dim)
        plan = metadata.plans.get(key)
        if plan is None:
            plan = plan_layer(batch, layer, q.shape[2], ready.multiprocessors, ready.workspace, self._invariant)
            metadata.plans[key] = plan
        launchers = ready.of(layer.head_dim)
        ready.make_schedules(plan, batch, launchers, kv_cache.data_ptr(), window)
        for launch in plan.launches:
            launchers.attend(
                q,
                k,
                v,
                out,
                kv_cache,
                batch.slot_mapping,
                batch.query_start_loc,
                batch.seq_lens,
                batch.block_tables,
                launch.schedule,
                launch.partials,
                launch.arrivals,
                layer.sinks,
                launch.counts[0] if layer.shares is None else 0,  # tokens to be written
                *launch.counts[1:],
                window,
                layer.scale,
                layer.soft_cap or 0.0,
                layer.k_scale,
                layer.v_scale,
            )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        if kv_cache.dim() == 3:
            cuda_latents.write_rows(k, kv_cache, slot_mapping, slot_mapping.shape[0])
            return
        launchers = self._prepared().of(k.shape[2])
        launchers.write_kv(k, v, kv_cache, slot_mapping, slot_mapping.shape[0], k_scale, v_scale)

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        self._prepared().blocks.copy(kv_caches, pairs)

    def swap_blocks(
        self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Gathered copies where the host caches are pinned; block by block where they are not."""
        blocks = self._prepared().blocks
        if blocks.reaches(sources) and blocks.reaches(destinations):
            blocks.swap(sources, destinations, pairs)
        else:
            super().swap_blocks(sources, destinations, pairs)

    def _prepared(self) -> _Ready:
        if self._ready is None:
            raise RuntimeError("CudaBackend: prepare() builds and loads the kernels; call it before the first step")
        return self._ready


class _Ready:
    """What a prepared backend works with: kernels, scratch memory, the machine's width."""

    def __init__(self, launchers: Mapping[int, Launchers], device: torch.device, multiprocessors: int) -> None:
        """`launchers`: by size of head. Blocks are moved by any of them."""
        self._launchers = launchers
        self.multiprocessors = multiprocessors
        self.workspace = Workspace(device)
        self.blocks = BlockMover(next(iter(launchers.values())), device)

    def of(self, head_dim: int) -> Launchers:
        """Raises RuntimeError: `bind` did not name it."""
        found = self._launchers.get(head_dim)
        if found is None:
            bound = ", ".join(map(str, self._launchers))
            raise RuntimeError(f"CudaBackend: its kernels are for head_dim {bound}, not {head_dim}")
        return found

    def make_schedules(
        self, plan: LayerPlan, batch: AttentionBatch, launchers: Launchers, cache_address: int, window: int
    ) -> None:
        """Queue schedule_decode at the first layer of a kind, and whenever that layer comes again: one metadata object
        may serve a warm-up and then a capture, and the graph must hold the launch."""
        for part in plan.parts:
            if part.made_by in (0, cache_address):
                part.made_by = cache_address
                launchers.schedule_decode(
                    batch.query_start_loc,
                    batch.seq_lens,
                    part.schedule,
                    part.first_seq,
                    part.num_seqs,
                    part.max_query_len,
                    part.max_items,
                    window,
                )
