"""The CUDA kernels on a CPU: their sources compiled by the C++ compiler against `cuda_emulator/`, loaded by ctypes.

`EmulatedLaunchers` is a `Launchers`, so `CudaBackend` itself runs over it on CPU tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from attention_backends.cuda_launchers import arrival_words
from attention_backends.toolchain import (
    CSRC,
    BuildError,
    build_once,
    find_compiler,
    hash_of,
    run,
    run_all,
    version_hash,
)

KERNELS = CSRC / "cuda"
EMULATOR = Path(__file__).parent / "cuda_emulator"
RUNTIME = ("runtime.cpp", "fiber.cpp", "memory.cpp", "warp.cpp")
# Stack clash protection: a frame larger than the guard below a thread's stack meets the guard all the same.
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-w", "-ffp-contract=off", "-fstack-clash-protection")
COMPILE_TIMEOUT_S = 300


class EmulatedLibrary:
    """A shared library of kernels and emulator; its launchers' errors become RuntimeError."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.seed(0)

    def seed(self, seed: int) -> None:
        """The order in which threads, warps and blocks run from now on."""
        self._library.pageloom_emulator_seed(ctypes.c_uint64(seed))

    def call(self, launcher: str, *arguments: object, reachable: Iterable[torch.Tensor] = ()) -> None:
        """`reachable`: the only global memory that 16-byte accesses may touch; empty: anything."""
        function = getattr(self._library, launcher)
        function.restype = ctypes.c_char_p
        self._library.pageloom_emulator_clear_ranges()
        for tensor in reachable:
            begin, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(_extent_bytes(tensor))
            self._library.pageloom_emulator_register(begin, count)
        error = function(*arguments)
        if error is not None:
            raise RuntimeError(f"{launcher}: {error.decode()}")


def compile_library(folder: Path, name: str, sources: Sequence[Path], defines: Sequence[str] = ()) -> EmulatedLibrary:
    """`sources` and the emulator as one library, unless the folder has it from the same files and compiler.

    Raises BuildError with the compiler's output.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++, c++, clang++) on PATH")
    files = sorted(path for room in (EMULATOR, KERNELS) for path in room.rglob("*") if path.is_file())
    units = [*sources, *(EMULATOR / unit for unit in RUNTIME)]
    key = hash_of((FLAGS, defines, [unit.name for unit in units], version_hash(compiler)), files)

    def make(scratch: Path) -> Path:
        flags = [*FLAGS, "-I", str(EMULATOR), "-I", str(KERNELS), *(f"-D{x}" for x in defines)]
        objects = [scratch / f"{unit.stem}.o" for unit in units]
        commands = [
            [compiler, *flags, "-x", "c++", "-c", str(unit), "-o", str(target)]
            for unit, target in zip(units, objects, strict=True)
        ]
        run_all(commands, COMPILE_TIMEOUT_S)
        built = scratch / "library.so"
        run([compiler, "-shared", *map(str, objects), "-o", str(built), "-Wl,-Bsymbolic"], COMPILE_TIMEOUT_S)
        return built

    library = folder / "emulated-cuda" / f"{name}_{key}.so"
    build_once(library, make)
    return EmulatedLibrary(library)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """From the first element to the last, whatever lies between."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span * tensor.element_size()


class Tokens(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64))


class Cache(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("first_seq", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
        ("sinks", ctypes.c_void_p),
    )


class DecodeSchedule(ctypes.Structure):
    _fields_ = (
        ("header", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("item_start", ctypes.c_void_p),
        ("max_items", ctypes.c_int32),
    )


class Partials(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("arrivals", ctypes.c_void_p))


def _tokens(tensor: torch.Tensor, head_dim: int, dtype: torch.dtype) -> Tokens:
    assert tensor.dtype == dtype
    assert tensor.dim() == 3
    assert tensor.shape[2] == head_dim
    assert tensor.stride(2) == 1
    assert tensor.data_ptr() % 16 == 0
    return Tokens(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _schedule(buffer: torch.Tensor, max_items: int, num_seqs: int) -> DecodeSchedule:
    """Header [2], items [max_items, 2], item_start [num_seqs + 1] in one buffer."""
    assert buffer.dtype == torch.int32
    assert buffer.is_contiguous()
    assert max_items > num_seqs
    assert buffer.numel() >= 2 + 2 * max_items + num_seqs + 1
    base = buffer.data_ptr()
    return DecodeSchedule(base, base + 8, base + 8 + 8 * max_items, max_items)


class EmulatedLaunchers:
    """`attention_backends.cuda_launchers.Launchers` for one (head_dim, query dtype, cache dtype)."""

    def __init__(self, library: EmulatedLibrary, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        self._library = library
        self.head_dim, self.dtype, self.kv_dtype = head_dim, dtype, kv_dtype

    def seed(self, seed: int) -> None:
        self._library.seed(seed)

    def schedule_decode(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        schedule: torch.Tensor,
        first_seq: int,
        num_seqs: int,
        max_query_len: int,
        max_items: int,
        window: int,
        /,
    ) -> None:
        batch = self._batch(query_start_loc, seq_lens, None, first_seq, num_seqs)
        self._library.call(
            "pageloom_schedule_decode",
            ctypes.byref(batch),
            ctypes.c_int32(window),
            ctypes.c_int32(max_query_len),
            ctypes.byref(_schedule(schedule, max_items, num_seqs)),
            None,
        )

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule: torch.Tensor | None,
        partials: torch.Tensor | None,
        arrivals: torch.Tensor | None,
        sinks: torch.Tensor | None,
        num_tokens: int,
        first_decode: int,
        num_decodes: int,
        max_query_len: int,
        max_items: int,
        first_prefill: int,
        num_prefills: int,
        prefill_tokens: int,
        window: int,
        scale: float,
        soft_cap: float,
        k_scale: float,
        v_scale: float,
        /,
    ) -> None:
        if num_tokens > 0:
            self.write_kv(k, v, kv_cache, slot_mapping, num_tokens, k_scale, v_scale)
        common = (*tuple(_tokens(x, self.head_dim, self.dtype) for x in (q, out)), self._cache(kv_cache))
        layer = Layer(q.shape[1], window, scale, soft_cap, k_scale, v_scale, None)
        reachable = [q, out, kv_cache]
        if sinks is not None:
            assert sinks.dtype == torch.float32
            assert sinks.shape == (q.shape[1],)
            layer.sinks = sinks.data_ptr()
            reachable.append(sinks)
        if num_decodes > 0:
            assert schedule is not None and partials is not None and arrivals is not None
            rows = max_query_len * (q.shape[1] // kv_cache.shape[2])
            outs = max_items * kv_cache.shape[2] * rows
            assert partials.numel() >= outs * (self.head_dim + 1)
            assert arrivals.dtype == torch.int32
            assert arrivals.numel() >= arrival_words(num_decodes, kv_cache.shape[2], rows)
            lse = partials.data_ptr() + 4 * outs * self.head_dim
            parts = Partials(partials.data_ptr(), lse, arrivals.data_ptr())
            batch = self._batch(query_start_loc, seq_lens, block_tables, first_decode, num_decodes)
            structs = (*common, batch, layer, _schedule(schedule, max_items, num_decodes), parts)
            memory = [*reachable, partials, schedule]
            self._library.call(
                "pageloom_decode", *map(ctypes.byref, structs), ctypes.c_int32(rows), None, reachable=memory
            )
        if num_prefills > 0:
            batch = self._batch(query_start_loc, seq_lens, block_tables, first_prefill, num_prefills)
            structs = (*common, batch, layer)
            tokens = ctypes.c_int32(prefill_tokens)
            self._library.call("pageloom_prefill", *map(ctypes.byref, structs), tokens, None, reachable=reachable)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_tokens: int,
        k_scale: float,
        v_scale: float,
        /,
    ) -> None:
        assert slot_mapping.dtype == torch.int64
        assert min(slot_mapping.numel(), k.shape[0], v.shape[0]) >= num_tokens
        keys, values = (_tokens(x, self.head_dim, self.dtype) for x in (k, v))
        self._library.call(
            "pageloom_write_kv",
            ctypes.byref(keys),
            ctypes.byref(values),
            ctypes.byref(self._cache(kv_cache)),
            ctypes.c_void_p(slot_mapping.data_ptr()),
            ctypes.c_int32(num_tokens),
            ctypes.c_float(k_scale),
            ctypes.c_float(v_scale),
            None,
            reachable=[k, v, kv_cache],
        )

    def copy_blocks(self, bases: torch.Tensor, pairs: torch.Tensor, block_bytes: int, /) -> None:
        self._move("pageloom_copy_blocks", bases, block_bytes, pairs, pairs.shape[0])

    def gather_blocks(self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int, /) -> None:
        self._move("pageloom_gather_blocks", bases, block_bytes, ids, ids.numel(), staging)

    def scatter_blocks(
        self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int, /
    ) -> None:
        self._move("pageloom_scatter_blocks", bases, block_bytes, ids, ids.numel(), staging)

    def _move(
        self,
        launcher: str,
        bases: torch.Tensor,
        block_bytes: int,
        ids: torch.Tensor,
        count: int,
        staging: torch.Tensor | None = None,
    ) -> None:
        assert ids.dtype == bases.dtype == torch.int64
        assert ids.is_contiguous()
        extra = []
        if staging is not None:
            assert staging.numel() * staging.element_size() >= ids.numel() * bases.numel() * block_bytes
            extra = [ctypes.c_void_p(staging.data_ptr())]
        self._library.call(
            launcher,
            ctypes.c_void_p(bases.data_ptr()),
            ctypes.c_int32(bases.numel()),
            ctypes.c_int64(block_bytes),
            ctypes.c_void_p(ids.data_ptr()),
            ctypes.c_int32(count),
            *extra,
            None,
        )

    def _cache(self, kv_cache: torch.Tensor) -> Cache:
        assert kv_cache.dtype == self.kv_dtype
        assert kv_cache[0].is_contiguous()
        _, two, num_kv_heads, block_size, head_dim = kv_cache.shape
        assert (two, head_dim) == (2, self.head_dim)
        block_bytes = kv_cache.stride(0) * kv_cache.element_size()
        return Cache(kv_cache.data_ptr(), block_bytes, num_kv_heads, block_size)

    def _batch(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor | None,
        first_seq: int,
        num_seqs: int,
    ) -> Batch:
        assert query_start_loc.dtype == seq_lens.dtype == torch.int32
        assert query_start_loc.numel() > first_seq + num_seqs
        assert seq_lens.numel() >= first_seq + num_seqs
        batch = Batch(query_start_loc.data_ptr(), seq_lens.data_ptr(), None, 0, first_seq, num_seqs)
        if block_tables is not None:
            assert block_tables.dtype == torch.int32
            assert block_tables.shape[0] >= first_seq + num_seqs
            batch.block_tables, batch.block_table_stride = block_tables.data_ptr(), block_tables.stride(0)
        return batch


EmulatedKernels = Callable[[int, torch.dtype, torch.dtype], EmulatedLaunchers]


def kernels_in(
    folder: Path, sources: Sequence[str] = ("attention.cu", "cache.cu"), shared_kib: int = 227
) -> EmulatedKernels:
    """(head_dim, query dtype, cache dtype) → launchers. What a folder holds is not compiled again. `shared_kib`: of a
    thread block, as launch.h says."""
    return partial(_launchers, folder, sources, shared_kib)


def _launchers(
    folder: Path, sources: Sequence[str], shared_kib: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> EmulatedLaunchers:
    fp8 = kv_dtype == torch.float8_e4m3fn
    assert fp8 or kv_dtype == dtype
    names = "_".join(Path(source).stem for source in sources)
    name = f"{names}_{head_dim}_{str(dtype).split('.')[1]}{'_fp8' if fp8 else ''}_{shared_kib}"
    defines = {
        "HEAD_DIM": head_dim,
        "HALF": int(dtype == torch.float16),
        "KV_FP8": int(fp8),
        "SHARED_KIB": shared_kib,
    }
    library = compile_library(
        folder, name, [KERNELS / x for x in sources], [f"PAGELOOM_{k}={v}" for k, v in defines.items()]
    )
    return EmulatedLaunchers(library, head_dim, dtype, kv_dtype)
