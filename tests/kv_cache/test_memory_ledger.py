"""The ledger adds up, and each refusal names a setting whose value, when followed, is accepted."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.kv_cache.ledger import human, memory_ledger
from engine.reports import LoadReport

GIB = 2**30
MIB = 2**20


def report(
    total: int = 80 * GIB, free: int = 78 * GIB, weights: int = 16 * GIB, block: int = 2 * MIB, graphs: int = 0
) -> LoadReport:
    return LoadReport(
        weight_bytes=weights,
        activation_bytes=GIB,
        workspace_bytes=256 * MIB,
        graph_bytes=graphs,
        block_bytes=block,
        device_bytes_total=total,
        device_bytes_free=free,
        attention_backend="reference",
    )


def cache(memory: int | None = None, fraction: float = 0.9) -> CacheConfig:
    return CacheConfig(
        dtype="float32", block_size=16, kv_cache_memory=memory, memory_fraction=fraction, enable_prefix_caching=True
    )


def limits(max_model_len: int = 8192, max_num_seqs: int = 256) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, max_model_len=max_model_len, max_waiting=10
    )


def test_the_fraction_of_the_device_is_divided_exactly() -> None:
    ledger = memory_ledger(load=report(graphs=GIB), cache=cache(), scheduler=limits(), device="cuda")
    assert ledger.num_blocks == (int(80 * GIB * 0.9) - 16 * GIB - 2 * GIB - 256 * MIB) // (2 * MIB)
    table = ledger.table()
    assert "weights" in table and "16.0 GiB" in table and "--memory-fraction 0.9" in table
    assert f"room for {ledger.num_blocks * 16} tokens" in table


def test_never_more_than_is_free() -> None:
    ledger = memory_ledger(load=report(free=40 * GIB), cache=cache(), scheduler=limits(), device="cuda")
    assert ledger.kv_bytes + 17 * GIB + 256 * MIB <= 40 * GIB


def test_kv_cache_memory_is_taken_as_given() -> None:
    for device in ("cpu", "cuda"):
        ledger = memory_ledger(load=report(), cache=cache(3 * GIB), scheduler=limits(), device=device)
        assert ledger.num_blocks == 1536


def test_on_a_cpu_no_more_than_all_sequences_can_use() -> None:
    ledger = memory_ledger(load=report(), cache=cache(), scheduler=limits(1000, 4), device="cpu")
    assert ledger.num_blocks == 4 * 63


def test_on_a_cpu_a_small_model_takes_what_its_sequences_typically_need() -> None:
    load = report(weights=GIB, block=360 * 1024)
    many = memory_ledger(load=load, cache=cache(), scheduler=limits(8192, 128), device="cpu")
    assert many.num_blocks == 128 * 512 // 16
    long = memory_ledger(load=load, cache=cache(), scheduler=limits(32768, 16), device="cpu")
    assert long.num_blocks == 4 * 32768 // 16, "and some of the whole context at once"


def test_on_a_cpu_most_of_the_memory_is_left_to_others() -> None:
    ledger = memory_ledger(load=report(), cache=cache(), scheduler=limits(), device="cpu")
    assert ledger.kv_bytes <= 78 * GIB / 4
    tight = memory_ledger(load=report(free=19 * GIB), cache=cache(), scheduler=limits(8192), device="cpu")
    assert tight.num_blocks == 512, "but one full sequence always, where it fits"


def _following(
    message: str, max_model_len: int, memory: int | None, fraction: float
) -> list[tuple[int, int | None, float]]:
    """Settings changed as the message says, one at a time."""
    out: list[tuple[int, int | None, float]] = []
    if found := re.search(r"--max-model-len to at most (\d+)", message):
        out.append((int(found[1]), memory, fraction))
    if found := re.search(r"--kv-cache-memory to at (?:most|least) (\d+)", message):
        out.append((max_model_len, int(found[1]), fraction))
    if found := re.search(r"--memory-fraction to at least ([\d.]+)", message):
        out.append((max_model_len, memory, float(found[1])))
    return out


@given(
    total=st.integers(2 * GIB, 100 * GIB),
    free_share=st.floats(0.0, 1.0),
    weights=st.integers(0, 40 * GIB),
    block=st.integers(1000, 64 * MIB),
    max_model_len=st.integers(2, 200_000),
    memory=st.none() | st.integers(0, 80 * GIB),
    fraction=st.floats(0.05, 1.0),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_what_is_granted_fits_and_what_is_refused_says_what_would(
    total: int,
    free_share: float,
    weights: int,
    block: int,
    max_model_len: int,
    memory: int | None,
    fraction: float,
    device: str,
) -> None:
    load = report(total, int(total * free_share), weights, block)

    def ledger(length: int, kv: int | None, part: float) -> int:
        made = memory_ledger(
            load=load, cache=cache(kv, part), scheduler=limits(length), device="cpu" if device == "cpu" else "cuda"
        )
        assert made.kv_bytes + weights + GIB + 256 * MIB <= load.device_bytes_free
        assert made.kv_tokens >= length
        made.table()
        return made.num_blocks

    try:
        ledger(max_model_len, memory, fraction)
    except ConfigError as refused:
        message = str(refused)
        follow = _following(message, max_model_len, memory, fraction)
        if not follow:
            assert "smaller model" in message
        for settings in follow:
            try:
                ledger(*settings)
            except ConfigError as again:
                # Too large first, then too small for one sequence: each step names the next.
                assert "does not fit" in message and "one sequence" in str(again)


def test_sizes_are_printed_in_human_units() -> None:
    assert [human(size) for size in (0, 1023, 1536, 3 * MIB, int(2.5 * GIB), 3 * 1024 * GIB)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "2.5 GiB",
        "3.0 TiB",
    ]
