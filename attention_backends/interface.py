"""What an attention backend is: paged attention for one step over a KV cache that the runner owns.

A backend holds no model and no cache; one instance serves one runner. Tensors live on the runner's device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from attention_backends.context import WHOLE, ContextPart, merge_parts


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads are made of one row a token (multi-head latent attention: DeepSeek-V2, 2024, section
    2.1): its first `rank` elements by a matrix, and the others are a part that all heads' keys have in common.

    Multiplying queries and what they find with the matrix gives the same as multiplying the rows (section 2.1.2: it is
    absorbed), so a backend may do either.
    """

    weight: torch.Tensor
    """[heads * (made of a key + value_dim), rank], of the queries' dtype: a head's key comes before its value"""
    value_dim: int

    @property
    def rank(self) -> int:
        return self.weight.size(1)

    def heads(self, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the matrix: [heads, made of a key, rank] and [heads, value_dim, rank]."""
        made = self.weight.unflatten(0, (num_heads, -1))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return made[:, : -self.value_dim], made[:, -self.value_dim :]


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention is. `window` w: query at position p sees keys in (p - w, p]; None sees all of [0, p].

    `soft_cap` c: scores become c * tanh(score / c) after scaling (Gemma 2). Scores are `scale * q.k`. An fp8 cache
    holds k / k_scale and v / v_scale; an int8 one has scales of its own, for each token and head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    """float32 [num_heads]: a logit of each head that joins the softmax and carries no value (GPT-OSS)"""
    k_scale: float = 1.0
    v_scale: float = 1.0
    chunk: int | None = None
    """In the place of a window: a query at position p sees keys in [p // chunk * chunk, p] (Llama 4)."""
    shares: int | None = None
    """The earlier layer of the same step whose cache this is: nothing is written, and k and v are not looked at."""
    latent: Latent | None = None
    """k, of one head, are rows of `head_dim` elements, and v is not looked at; queries are as large as a head's keys"""

    @property
    def signed_window(self) -> int:
        """As kernels take it: the window, less than 0 a chunk of so many, or 0 where all is seen."""
        return -self.chunk if self.chunk is not None else self.window or 0


@dataclass(frozen=True)
class Capabilities:
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None = None
    """None: any"""
    block_sizes: frozenset[int] | None = None
    """None: any"""
    kv_dtypes: frozenset[torch.dtype] = frozenset()
    """cache dtypes beside that of the queries, which always serves"""
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    chunk: bool = False
    latent: bool = False
    """of the queries' dtype"""
    context_parts: bool = False
    """`AttentionBatch.context` may be less than the whole"""
    invariant: bool = False
    """see `AttentionSpec`"""
    capture_safe: bool = False
    """true when `forward` may be recorded in a CUDA graph and replayed with new metadata in the same buffers"""


@dataclass(frozen=True)
class AttentionSpec:
    """What every layer of one runner has in common; kernels may be built for it."""

    device: torch.device
    dtype: torch.dtype
    """of queries and outputs"""
    kv_dtype: torch.dtype
    """of the cache"""
    head_dims: tuple[int, ...]
    """of its layers, each once; not of those that keep latents"""
    invariant: bool = False
    """a row's bits must depend on its keys alone, not on the batch or how its sequence is cut into steps"""


@dataclass(frozen=True)
class AttentionBatch:
    """One step as the runner sees it. Device tensors may be longer than needed (padding); `num_*` tell what is real.

    The KV of this step's tokens is written before anything is read, so sequences of one batch may share blocks that the
    batch itself fills.
    """

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    """int32 [num_seqs + 1]: sequence i's queries are tokens query_start_loc[i] .. query_start_loc[i + 1]"""
    seq_lens: torch.Tensor
    """int32 [num_seqs]: KV length including this step's tokens; the last query of i is at position seq_lens[i] - 1"""
    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks]; what lies before the window of a group's layers names any block"""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block * block_size + offset where each token's KV goes; -1: nowhere (padding)"""
    block_size: int
    num_decodes: int = 0
    """the first num_decodes sequences have one query each"""
    query_lens_host: Sequence[int] = field(default=())
    """of the real sequences; a padded batch has more of them (`num_seqs`), with length 0 at the end"""
    seq_lens_host: Sequence[int] = field(default=())
    group: int = 0
    """The layer group whose block tables these are. A step has a batch for each group, alike but for tables and slots;
    metadata of all of them is in use at once."""
    context: ContextPart = WHOLE
    """Not all: the cache has these positions only, and `forward` finds what `merge_parts` takes of one part. Lengths
    and positions stay those of whole sequences; `block_size` and slots are the part's."""
    graph_size: int | None = None
    """Not None: a decode of this many sequences (= num_seqs, padding included, one token each) that is about to be
    captured in, or replayed from, one CUDA graph over the whole model. Its metadata must live in buffers that belong to
    this size and group, and nothing that `forward` passes by value (grids, pointers) may depend on lengths.
    Capture-safe backends only. Sequences of length 0 must leave finite numbers (zeros) in their rows of `out`."""


@dataclass(frozen=True)
class NativeLayer:
    """One layer's `forward` for a caller in native code, as `csrc/native_call.h` declares it: bfloat16 rows, no Python.

    A call reads `layer` and what `native_step` returned in place: hold both, the cache and the step's tensors.
    """

    function: int
    """address of a `pageloom::NativeAttention`, the same for every layer of a backend; good until the process ends"""
    layer: torch.Tensor
    """uint8 on the host; points into the cache and the layer's sinks, which its holder keeps alive"""
    step: int = 0
    """which of the caller's steps it takes: layer groups have each their own"""
    scratch_bytes: int = 0
    """of the caller's memory that a call needs for each row"""


class ContextHeads(NamedTuple):
    """A layer's heads as ranks have them that divide its context: of their sum each attends to its own positions."""

    group: tuple[int, ...]
    """where native code finds the group's exchanges, and the group (`NativeGroup.native_exchange`)"""
    rank: int
    queries: tuple[int, ...]
    """heads of each rank, in order"""
    keys: tuple[int, ...]
    """that each rank gives: every one is given once"""


class AttentionBackend(ABC):
    """Backends register under the entry-point group `pageloom.attention_backends` and are built with no arguments."""

    name: str
    speed_rank: ClassVar[int] = 50
    """Where several could serve, the lowest is chosen: native kernels 10, the oracle 100."""
    only_by_name: ClassVar[frozenset[str]] = frozenset()
    """Kinds of device on which it is never chosen unless it is asked for by its name."""
    needs_host_lengths: ClassVar[bool] = False
    """`AttentionBatch.seq_lens_host` must be exact; elsewhere they may be upper bounds of decodes' lengths."""

    @classmethod
    @abstractmethod
    def capabilities(cls) -> Capabilities:
        """What this backend can do here; cheap, builds and loads nothing."""

    @classmethod
    def unavailable(cls, cache_dir: Path | None = None) -> str | None:
        """Why it cannot run on this machine (missing compiler, library, GPU), or None. `cache_dir` as in `prepare`."""
        return None

    def bind(self, spec: AttentionSpec) -> None:  # noqa: B027 - most backends serve whatever their capabilities name
        """What it will be asked to serve; called once, before `prepare`. Cheap: keeps what `prepare` needs to know."""

    def prepare(self, cache_dir: Path | None = None) -> None:  # noqa: B027 - most backends have nothing to prepare
        """Called once, after `bind` and before anything else, outside any step: build or load kernels, keeping
        artifacts under `cache_dir` (None: the backend's own default). Raises RuntimeError with the reason where that
        fails."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's cache, `shape[0] == num_blocks`. The runner allocates it zeroed, in the cache dtype;
        blocks are contiguous, at multiples of 16 bytes, and between two there may be what other layers keep."""

    def latent_cache_shape(self, num_blocks: int, block_size: int, row_size: int) -> tuple[int, ...]:
        """The same of a layer that keeps latents, of a backend that has them: one array, of so many elements a row."""
        raise NotImplementedError(f"{self.name}: keeps no latents")

    def workspace_bytes(self, max_num_seqs: int, layers: Sequence[AttentionLayer], num_groups: int = 1) -> int:
        """Upper estimate of the scratch memory that steps and graphs of up to `max_num_seqs` sequences over `layers`,
        in `num_groups` groups, will allocate, beside caches and weights; asked after `prepare`. Cheap, allocates
        nothing."""
        return 0

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> object:
        """Once per step, before the first layer: whatever all layers share (splits, plans). Never synchronises."""

    @abstractmethod
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
        """Write this step's k, v into the cache (not where `layer.shares` another's), then attend; result into `out`.

        q, out [tokens, num_heads, head_dim]; k, v [tokens, num_kv_heads, head_dim]; the last dimension is contiguous,
        the token stride is free (they may be views of a merged QKV tensor). Of latents q [tokens, num_heads, a key's
        size], out [tokens, num_heads, value_dim], k [tokens, 1, head_dim]. Padding tokens (beyond num_tokens) are not
        touched. The cache's dtype is that of q, or one of `Capabilities.kv_dtypes`.

        Of a part of a context, `out` is float32 [tokens, num_heads, head_dim + 1], as `merge_parts` says; `layer` has
        no sinks then, which join all parts.
        """

    def merge_parts(self, found: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """What parts of a context found → what the whole finds, in `out` [tokens, heads, head_dim], a view or not: see
        `attention_backends.context.merge_parts`. Bits depend on nothing else."""
        out.copy_(merge_parts(found, sinks))

    def native_layer(
        self, layer: AttentionLayer, kv_cache: torch.Tensor, dtype: torch.dtype, heads: ContextHeads | None = None
    ) -> NativeLayer | None:
        """What a caller in native code needs in the place of `forward` over this cache, with queries of `dtype`; None:
        only `forward` serves. `heads`: `layer` is that of all ranks, with the sinks of this rank's heads; q, k, v and
        what is found are this rank's, and a call exchanges them. Asked after `prepare`, once for each layer and cache.
        Raises RuntimeError: the cache or the heads are not what `forward` takes."""
        return None

    def native_step(self, metadata: object) -> torch.Tensor:
        """What `metadata` is to a caller in native code, for every layer of its step: uint8 on the host, and points
        into the tensors of `metadata`, which its holder keeps alive. Only of backends that have a `native_layer`.
        Raises RuntimeError as `forward` does."""
        raise NotImplementedError(f"{self.name}: no native entry; native_layer returned None")

    @abstractmethod
    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Only the write half of `forward`."""

    @abstractmethod
    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block source → destination in every cache, one call (copy-on-write).

        A cache here is contiguous, [num_blocks, ...]: one layer's, or what several have together of each block.
        Destinations are distinct from sources."""

    def swap_blocks(
        self, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Copy block source → destination in every cache between the device's, as in `copy_blocks`, and host caches of
        the same block shape, in either direction. Work that is queued on the current stream afterwards sees the result;
        the host may read it after synchronising with that stream. Host caches should be pinned: with pageable memory
        copies are slow, and the host waits for them."""
        for source, destination in zip(sources, destinations, strict=True):
            for from_block, to_block in pairs:
                destination[to_block].copy_(source[from_block], non_blocking=True)
