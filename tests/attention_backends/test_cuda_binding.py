"""The binding of the CUDA kernels, run on a CPU over stub launchers: what it hands on, and what it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_backends.cuda_build import SOURCES, CudaKernels, binding_command
from attention_backends.cuda_launchers import OpLaunchers, arrival_words, partial_floats, schedule_words
from attention_backends.toolchain import TORCH_LIBRARIES, find_compiler, run

HEAD_DIM, HEADS, KV_HEADS, BLOCK = 64, 8, 2, 16
STUBS = Path(__file__).parent / "stub_launchers.cpp"
FP8 = torch.float8_e4m3fn


@dataclass
class Bound:
    launchers: OpLaunchers
    library: ctypes.CDLL

    def calls(self) -> list[list[str]]:
        """Words of each launch since the last time."""
        return [line.split() for line in self.library.stub_calls().decode().splitlines()]


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype, torch.dtype], Bound]:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    made: dict[tuple[torch.dtype, torch.dtype], Bound] = {}

    def build(dtype: torch.dtype, kv_dtype: torch.dtype) -> Bound:
        if (dtype, kv_dtype) not in made:
            folder = tmp_path_factory.mktemp("binding")
            namespace = f"pageloom_cuda_stub_{len(made)}"
            command = binding_command(
                compiler, folder / "binding.o", CudaKernels(HEAD_DIM, dtype, kv_dtype, (9, 0)), namespace
            )
            run([*command, "-DPAGELOOM_DISPATCH=CPU", "-Wall", "-Wextra"], 300)
            flags = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", f"-I{SOURCES}"]
            run([compiler, *flags, "-c", str(STUBS), "-o", str(folder / "stubs.o")], 300)
            objects = [str(folder / "binding.o"), str(folder / "stubs.o")]
            path = folder / "library.so"
            run([compiler, "-shared", *objects, "-o", str(path), "-Wl,--no-as-needed", *TORCH_LIBRARIES], 300)
            torch.ops.load_library(str(path))
            library = ctypes.CDLL(str(path))
            library.stub_calls.restype = ctypes.c_char_p
            made[dtype, kv_dtype] = Bound(OpLaunchers(namespace), library)
        made[dtype, kv_dtype].calls()
        return made[dtype, kv_dtype]

    return build


@dataclass
class Step:
    """Arguments of `attend`: two decodes (of at most 2 queries), then one prefill."""

    arguments: dict[str, Any]

    @staticmethod
    def of(dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> Step:
        merged = torch.zeros(12, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
        q, k, v = merged.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
        items = 5
        return Step(
            {
                "q": q.unflatten(1, (HEADS, HEAD_DIM)),
                "k": k.unflatten(1, (KV_HEADS, HEAD_DIM)),
                "v": v.unflatten(1, (KV_HEADS, HEAD_DIM)),
                "out": torch.zeros(12, HEADS, HEAD_DIM, dtype=dtype),
                "kv_cache": torch.zeros(6, 2, KV_HEADS, BLOCK, HEAD_DIM, dtype=kv_dtype or dtype),
                "slot_mapping": torch.zeros(12, dtype=torch.int64),
                "query_start_loc": torch.zeros(4, dtype=torch.int32),
                "seq_lens": torch.zeros(3, dtype=torch.int32),
                "block_tables": torch.zeros(3, 7, dtype=torch.int32)[:, :5],
                "schedule": torch.zeros(schedule_words(items, 2), dtype=torch.int32),
                "partials": torch.zeros(partial_floats(items, KV_HEADS, 8, HEAD_DIM)),
                "arrivals": torch.zeros(arrival_words(2, KV_HEADS, 8), dtype=torch.int32),
                "sinks": torch.zeros(HEADS),
                "num_tokens": 11,
                "first_decode": 0,
                "num_decodes": 2,
                "max_query_len": 2,
                "max_items": items,
                "first_prefill": 2,
                "num_prefills": 1,
                "prefill_tokens": 7,
                "window": 9,
                "scale": 0.125,
                "soft_cap": 30.0,
                "k_scale": 0.5,
                "v_scale": 2.0,
            }
        )

    def attend(self, bound: Bound, **changed: Any) -> None:
        bound.launchers.attend(*{**self.arguments, **changed}.values())


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, FP8)],
    ids=str,
)
def test_attend_hands_everything_on_in_order(
    bound: Callable[[torch.dtype, torch.dtype], Bound], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    library, step = bound(dtype, kv_dtype), Step.of(dtype, kv_dtype)
    step.attend(library)
    at = {name: x.data_ptr() for name, x in step.arguments.items() if isinstance(x, torch.Tensor)}
    row = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    tokens = {name: f"tokens {at[name]} {row} {HEAD_DIM}" for name in "qkv"}
    tokens["out"] = f"tokens {at['out']} {HEADS * HEAD_DIM} {HEAD_DIM}"
    cache = f"cache {at['kv_cache']} {step.arguments['kv_cache'][0].nbytes} {KV_HEADS} {BLOCK}"
    batch = f"batch {at['query_start_loc']} {at['seq_lens']} {at['block_tables']} 7"
    layer = f"layer {HEADS} 9 0.125 30 0.5 2 {at['sinks']}"
    schedule = f"schedule {at['schedule']} {at['schedule'] + 8} {at['schedule'] + 8 + 40} 5"
    lse = at["partials"] + 4 * 5 * KV_HEADS * 8 * HEAD_DIM
    partials = f"partials {at['partials']} {lse} {at['arrivals']}"
    assert [" ".join(call) for call in library.calls()] == [
        f"write_kv {at['slot_mapping']} 11 0.5 2 {tokens['k']} {tokens['v']} {cache}",
        f"decode 8 {tokens['q']} {tokens['out']} {cache} {batch} 0 2 {layer} {schedule} {partials}",
        f"prefill 7 {tokens['q']} {tokens['out']} {cache} {batch} 2 1 {layer}",
    ]


def test_parts_that_are_empty_are_not_launched(bound: Callable[[torch.dtype, torch.dtype], Bound]) -> None:
    library, step = bound(torch.bfloat16, torch.bfloat16), Step.of()
    nothing = {"schedule": None, "partials": None, "arrivals": None, "sinks": None}
    step.attend(library, num_tokens=0, num_decodes=0, **nothing)
    (call,) = library.calls()
    assert call[0] == "prefill"
    assert call[-1] == "0", "no sinks"
    step.attend(library, num_tokens=0, num_prefills=0)
    assert [call[0] for call in library.calls()] == ["decode"]


def test_the_other_launchers_get_their_arguments(bound: Callable[[torch.dtype, torch.dtype], Bound]) -> None:
    library, a = bound(torch.bfloat16, torch.bfloat16), Step.of().arguments
    ops, schedule = library.launchers, a["schedule"]
    ops.schedule_decode(a["query_start_loc"], a["seq_lens"], schedule, 1, 2, 4, 5, 33)
    ops.write_kv(a["k"], a["v"], a["kv_cache"], a["slot_mapping"], 12, 1.0, 1.0)
    bases, pairs = torch.arange(3), torch.zeros(4, 2, dtype=torch.int64)
    ids, staging = torch.arange(2), torch.zeros(2 * 3 * 64, dtype=torch.uint8)
    ops.copy_blocks(bases, pairs, 64)
    ops.gather_blocks(bases, ids, staging, 64)
    ops.scatter_blocks(bases, ids, staging, 64)
    starts = f"{a['query_start_loc'].data_ptr()} {a['seq_lens'].data_ptr()}"
    first, second, *rest = (" ".join(call) for call in library.calls())
    assert first.startswith(f"schedule_decode 33 4 batch {starts} 0 0 1 2 schedule {schedule.data_ptr()}")
    assert second.startswith(f"write_kv {a['slot_mapping'].data_ptr()} 12 1 1 tokens")
    assert rest == [
        f"copy_blocks {bases.data_ptr()} 3 64 {pairs.data_ptr()} 4",
        f"gather_blocks {bases.data_ptr()} 3 64 {ids.data_ptr()} 2 {staging.data_ptr()}",
        f"scatter_blocks {bases.data_ptr()} 3 64 {ids.data_ptr()} 2 {staging.data_ptr()}",
    ]


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("for bfloat16; q", {"q": torch.zeros(12, HEADS, HEAD_DIM, dtype=torch.float16)}),
    ("q must be", {"q": torch.zeros(12, HEADS, 32, dtype=torch.bfloat16)}),
    ("out must be", {"out": torch.zeros(10, HEADS, HEAD_DIM, dtype=torch.bfloat16)}),
    ("k must be", {"k": torch.zeros(12, 3, HEAD_DIM, dtype=torch.bfloat16)}),
    ("last dimension of v", {"v": torch.zeros(12, KV_HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)[..., ::2]}),
    (
        "rows of k must start",
        {"k": torch.zeros(12, 3 * HEAD_DIM, dtype=torch.bfloat16)[:, 1:129].unflatten(1, (2, 64))},
    ),
    ("not a multiple of 2 KV", {"q": torch.zeros(12, 7, HEAD_DIM, dtype=torch.bfloat16)}),
    ("bfloat16 KV cache", {"kv_cache": torch.zeros(6, 2, KV_HEADS, BLOCK, HEAD_DIM)}),
    ("kv_cache must be", {"kv_cache": torch.zeros(6, KV_HEADS, 2, BLOCK, 32, dtype=torch.bfloat16)}),
    ("blocks must be contiguous", {"kv_cache": torch.zeros(6, 2, KV_HEADS, HEAD_DIM, BLOCK).bfloat16().mT}),
    ("block size 24", {"kv_cache": torch.zeros(6, 2, KV_HEADS, 24, HEAD_DIM, dtype=torch.bfloat16)}),
    ("slot_mapping", {"slot_mapping": torch.zeros(10, dtype=torch.int64)}),
    ("query_start_loc", {"query_start_loc": torch.zeros(3, dtype=torch.int32)}),
    ("seq_lens must be int32", {"seq_lens": torch.zeros(3, dtype=torch.int64)}),
    ("block_tables", {"block_tables": torch.zeros(2, 5, dtype=torch.int32)}),
    ("decode schedule must be int32", {"schedule": torch.zeros(10, dtype=torch.int32)}),
    ("needs a schedule", {"schedule": None}),
    ("decode partials", {"partials": torch.zeros(100)}),
    ("needs .* arrivals", {"arrivals": None}),
    ("arrivals must be int32 of at least 4", {"arrivals": torch.zeros(3, dtype=torch.int32)}),
    ("sinks", {"sinks": torch.zeros(HEADS - 1)}),
    ("max_items 2", {"max_items": 2}),
    ("68 rows", {"max_query_len": 17}),
    ("window -2147483648", {"window": -(2**31)}),
]


@pytest.mark.parametrize(("message", "changed"), REFUSALS, ids=[message for message, _ in REFUSALS])
def test_tensors_that_do_not_fit_are_refused(
    bound: Callable[[torch.dtype, torch.dtype], Bound], message: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(RuntimeError, match=message):
        Step.of().attend(bound(torch.bfloat16, torch.bfloat16), **changed)


def test_a_launch_that_fails_is_an_error_with_its_reason(bound: Callable[[torch.dtype, torch.dtype], Bound]) -> None:
    library = bound(torch.bfloat16, torch.bfloat16)
    library.library.stub_fail(True)
    try:
        with pytest.raises(RuntimeError, match="fails on purpose"):
            Step.of().attend(library)
    finally:
        library.library.stub_fail(False)


def test_blocks_and_staging_buffers_that_do_not_fit_are_refused(
    bound: Callable[[torch.dtype, torch.dtype], Bound],
) -> None:
    ops = bound(torch.bfloat16, torch.bfloat16).launchers
    bases, ids = torch.arange(3), torch.arange(2)
    with pytest.raises(RuntimeError, match="multiple of 16"):
        ops.copy_blocks(bases, torch.zeros(1, 2, dtype=torch.int64), 40)
    with pytest.raises(RuntimeError, match="staging buffer must be uint8 of at least 384"):
        ops.gather_blocks(bases, ids, torch.zeros(383, dtype=torch.uint8), 64)
    with pytest.raises(RuntimeError, match=r"\[pairs, 2\]"):
        ops.copy_blocks(bases, torch.zeros(4, dtype=torch.int64), 64)
