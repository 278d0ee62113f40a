"""Bytes and operations of steps, against counting one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec
from engine.observability.step_profile import ATTENTION, LOGITS, MODEL, SAMPLING
from engine.observability.step_work import Ceilings, ModelWeights, StepWork, Weight, Work
from engine.step import NewRow, RowParams, Rows, ScheduledRow, StepPlan, Write, Writes

BLOCK = 4
KV_BYTES = 10.0
WINDOWS = (None, 5, None)
MLP = MlpSpec(intermediate_size=12)
SPEC = DecoderSpec(
    family="llama",
    vocab_size=50,
    hidden_size=8,
    layers=tuple(
        LayerSpec(mixer=MixerSpec(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, window=window), mlp=MLP)
        for window in WINDOWS
    ),
    norm_eps=1e-5,
    max_position=64,
)
TABLE = Weight(name="embed_tokens.weight", size_bytes=800, ops_per_token=800.0, ops_dtype="f", rows=50)
MATRIX = Weight(name="layers.0.o_proj.weight", size_bytes=300, ops_per_token=64.0, ops_dtype="f")
NORM = Weight(name="norm.weight", size_bytes=16)
HEAD = Weight(name="lm_head.weight", size_bytes=400, ops_per_token=800.0, ops_dtype="q")
CEILINGS = Ceilings(read_bytes_per_s=100.0, main_memory_bytes_per_s=50.0, ops_per_s={"f": 1000.0, "q": 4000.0})


def step_work() -> StepWork:
    weights = ModelWeights(pieces={"piece 0": [MATRIX, NORM]}, model=[TABLE, MATRIX, NORM], logits=[HEAD])
    return StepWork(SPEC.facts, weights, block_size=BLOCK, kv_token_bytes=3 * KV_BYTES, attention_dtype="f")


def row(index: int, computed: int, query_len: int, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(row=index, computed=computed, query_len=query_len, samples=samples)


def first_step(rows: list[ScheduledRow], tables: dict[int, list[int]]) -> StepPlan:
    params = RowParams(seed=0)
    return StepPlan(
        step_id=1,
        rows=Rows.of(rows),
        added=[NewRow(row=i, token_ids=[1], prompt_len=1, params=params) for i in tables],
        block_appends=Writes.of(Write(0, i, 0, blocks) for i, blocks in tables.items()),
    )


@given(st.data())
def test_attention_reads_each_distinct_token_that_some_query_sees_once(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    shared = [100 + i for i in range(data.draw(st.integers(0, 4)))]
    rows, tables = [], {}
    for index in range(data.draw(st.integers(1, 4))):
        # what is shared lies in full blocks, so each row has computed all of it
        computed = len(shared) * BLOCK + rng.randint(0, 12)
        query_len = rng.choice([1, rng.randint(1, 9)])
        own = -(-(computed + query_len) // BLOCK) - len(shared)
        tables[index] = shared + [1000 * (index + 1) + i for i in range(own)]
        rows.append(row(index, computed, query_len))
    found = step_work().of(first_step(rows, tables), {})[ATTENTION]

    slots, pairs = 0, 0
    for window in WINDOWS:
        seen = set()
        for r in rows:
            for position in range(r.computed, r.computed + r.query_len):
                keys = [k for k in range(position + 1) if window is None or k > position - window]
                pairs += len(keys)
                seen |= {(tables[r.row][k // BLOCK], k % BLOCK) for k in keys if k < r.computed}
        slots += len(seen) + sum(r.query_len for r in rows)
    assert found.bytes == pytest.approx(KV_BYTES * slots)
    mixer = SPEC.layers[0].mixer
    assert found.ops == pytest.approx({"f": 4.0 * mixer.num_heads * mixer.head_dim * pairs})


def test_block_tables_follow_the_plans() -> None:
    work = step_work()
    work.of(first_step([row(0, 0, 4), row(1, 0, 4)], {0: [7], 1: [8]}), {})
    append = Writes.of([Write(0, 0, 1, [9])])
    both = work.of(StepPlan(step_id=2, rows=Rows.of([row(0, 4, 1), row(1, 3, 1)]), block_appends=append), {})
    assert both[ATTENTION].bytes == pytest.approx(3 * KV_BYTES * (4 + 1 + 3 + 1))
    again = first_step([row(0, 4, 1), row(1, 4, 1)], {1: [7, 10]})  # row 1 is another sequence, with row 0's prefix
    again = StepPlan(step_id=3, rows=again.rows, released=[1], added=again.added, block_appends=again.block_appends)
    assert work.of(again, {})[ATTENTION].bytes == pytest.approx(3 * KV_BYTES * (4 + 2))


def test_weights_are_read_whole_and_tables_by_the_row() -> None:
    plan = first_step([row(0, 0, 3, samples=False), row(1, 0, 2)], {0: [1], 1: [2]})
    eager = step_work().of(plan, {MODEL: 1})
    assert eager[MODEL].bytes == 5 * 16 + 300 + 16 and eager[MODEL].ops == {"f": 5 * 64.0}
    assert eager[LOGITS].bytes == 400 and eager[LOGITS].ops == {"q": 800.0}  # of the row that samples
    assert eager[SAMPLING].bytes == 4 * 50
    pieces = step_work().of(plan, {"piece 0": 3, ATTENTION: 3})
    assert MODEL not in pieces
    assert pieces["piece 0"].bytes == 3 * 316 and pieces["piece 0"].ops == {"f": 3 * 5 * 64.0}
    prefill = step_work().of(first_step([row(0, 0, 3, samples=False)], {0: [1]}), {})
    assert LOGITS not in prefill and SAMPLING not in prefill
    assert step_work().of(StepPlan(step_id=0, released=[3]), {}) == {}


def test_of_experts_those_are_read_that_some_token_has_chosen() -> None:
    experts = Weight(name="experts.down", size_bytes=3200, ops_per_token=128.0, ops_dtype="f", chosen=4 / 32)
    assert experts.work(1).bytes == pytest.approx(400)
    assert experts.work(2).bytes == pytest.approx(750)  # an eighth of the second's are the first's, too
    assert experts.work(500).bytes == pytest.approx(3200) and experts.work(500).ops == {"f": 64_000.0}


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    assert Work(50.0, {"f": 100.0}).floor_s(CEILINGS) == pytest.approx(0.5)
    assert Work(50.0, {"f": 900.0, "q": 400.0}).floor_s(CEILINGS) == pytest.approx(1.0)
    assert Work().floor_s(CEILINGS) == 0.0
