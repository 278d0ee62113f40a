"""Steps of the FlashInfer backend behind one another: several kinds of layers, captured decodes, a device that lags."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, Stream, fake_runtime
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import Case

from attention_backends import flashinfer_plans
from attention_backends.alternating_sets import ImmediateEvent, Lease
from attention_backends.flashinfer import FlashInferBackend
from attention_backends.interface import AttentionBatch
from attention_backends.reference import ReferenceBackend

DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 300), (1, 33)]
MIXED = [*DECODES, (16, 16), (0, 0), (37, 37), (5, 261), (1, 5), (0, 7), (40, 90), (2, 2)]


def prepared(stream: Stream | None = None) -> FlashInferBackend:
    backend = FlashInferBackend(fake_runtime(stream))
    backend.prepare()
    return backend


class Model:
    """Layers of several kinds over caches of their own, attended in one step after another."""

    def __init__(self, backend: FlashInferBackend, kinds: list[tuple[int | None, float | None]]) -> None:
        self.cases = [
            Case([(1, 1)], dtype=torch.bfloat16, window=window, soft_cap=cap, seed=seed)
            for seed, (window, cap) in enumerate(kinds)
        ]
        self.backend = backend
        shape = backend.kv_cache_shape(64, 16, 2, 64)
        generator = torch.Generator().manual_seed(5)
        self.caches = [torch.randn(shape, generator=generator).bfloat16() for _ in kinds]

    def batch(self, lengths: list[tuple[int, int]], graph_size: int | None = None) -> AttentionBatch:
        """Block tables of 16 columns (longer sequences are cut); nothing is written, so sequences may share blocks."""
        case = Case([(q, min(n, 256)) for q, n in lengths], graph_size=graph_size)
        count = len(case.padded_lengths)
        generator = torch.Generator().manual_seed(sum(n for _, n in lengths))
        tables = torch.randint(0, 64, (count, 16), generator=generator, dtype=torch.int32)
        nowhere = torch.full((case.num_tokens,), -1)
        return replace(case.batch(tables), slot_mapping=nowhere)

    def inputs(self, batch: AttentionBatch, seed: int) -> torch.Tensor:
        return torch.randn(batch.num_tokens, 4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def attend(self, q: torch.Tensor, out: torch.Tensor, metadata: object) -> None:
        """q, out [tokens, 4, 64]; out gets one [tokens, 4, 64] for each layer behind the other"""
        kv = torch.zeros(len(q), 2, 64, dtype=q.dtype)
        for case, cache, each in zip(self.cases, self.caches, out):
            self.backend.forward(q, kv, kv, each, cache, case.layer, metadata)

    def step(self, batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(self.cases), *q.shape, dtype=q.dtype)
        self.attend(q, out, self.backend.build_metadata(batch))
        return out

    def want(self, batch: AttentionBatch, q: torch.Tensor) -> torch.Tensor:
        reference, out = ReferenceBackend(), torch.zeros(len(self.cases), *q.shape, dtype=torch.float64)
        kv = torch.zeros(len(q), 2, 64, dtype=torch.float64)
        for case, cache, each in zip(self.cases, self.caches, out):
            nhd = cache.double().transpose(2, 3)
            reference.forward(q.double(), kv, kv, each, nhd, case.layer, reference.build_metadata(batch))
        return out


KINDS: list[tuple[int | None, float | None]] = [
    (None, None),
    (21, None),
    (None, None),
    (21, 5.0),
    (21, None),
    (None, 30.0),
]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-7)


def test_layers_of_several_kinds_in_one_step_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[type, int]] = []
    for wrapper in (FakeDecodeWrapper, FakePrefillWrapper):
        plan = wrapper.plan

        def counted(self: object, *args: object, plan: object = plan, **more: object) -> None:
            planned.append((type(self).__mro__[1], more["window_left"]))
            plan(self, *args, **more)

        monkeypatch.setattr(wrapper, "plan", counted)
    model = Model(prepared(), KINDS)
    for lengths in (MIXED, DECODES, [(9, 9)]):
        planned.clear()
        batch = model.batch(lengths)
        q = model.inputs(batch, 1)
        assert_close(model.step(batch, q), model.want(batch, q))
        parts = (lengths[0][0] == 1) + (lengths[-1][0] > 1)
        assert len(planned) == parts * len(set(KINDS))


@pytest.mark.parametrize("sizes", [(16, 8, 4), (4, 8, 16)], ids=["descending", "ascending"])
def test_captured_decodes_replay_with_the_metadata_of_each_step(sizes: tuple[int, ...]) -> None:
    stream = Stream()
    model = Model(prepared(stream), KINDS)
    graphs = {}
    for size in sizes:
        batch = model.batch([], size)
        q, out = torch.zeros(size, 4, 64).bfloat16(), torch.zeros(len(KINDS), size, 4, 64).bfloat16()
        metadata = model.backend.build_metadata(batch)
        model.attend(q, out, metadata)
        graphs[size] = (q, out, stream.capture(lambda q=q, out=out, metadata=metadata: model.attend(q, out, metadata)))
    lengths = [(1, n) for n in (200, 17, 16, 1, 256, 90, 33, 2)]
    for step, (size, real) in enumerate([(8, 8), (8, 5), (4, 3), (16, 8), (8, 7), (4, 4), (16, 1), (8, 8)]):
        batch = model.batch(lengths[step % 3 :][:real], size)
        q, out, recorded = graphs[size]
        q.copy_(model.inputs(batch, step))
        out.fill_(float("nan"))
        model.backend.build_metadata(batch)
        stream.replay(recorded)
        assert_close(out, model.want(batch, q))
        eager = model.batch(MIXED[:5])  # a step between graph steps takes a set too
        assert_close(model.step(eager, model.inputs(eager, step)), model.want(eager, model.inputs(eager, step)))


def run_late(progress: list[int], graph_every: int) -> bool:
    """Steps submitted to a device that falls behind; whether all of them got what they would get alone."""
    stream = Stream()
    model = Model(prepared(stream), KINDS[:2])
    size, capture_batch = 4, model.batch([], 4)
    q, out = torch.zeros(size, 4, 64).bfloat16(), torch.zeros(2, size, 4, 64).bfloat16()
    metadata = model.backend.build_metadata(capture_batch)
    model.attend(q, out, metadata)
    recorded = stream.capture(lambda: model.attend(q, out, metadata))
    stream.late = True
    results = []
    for step, done in enumerate(progress):
        if step % graph_every == 0:
            batch = model.batch([(1, 20 + 30 * (step % 5)), (1, 5 + step)], size)
            inputs, got = model.inputs(batch, step), torch.zeros_like(out)
            model.backend.build_metadata(batch)
            stream.push(lambda inputs=inputs: q.copy_(inputs))
            stream.replay(recorded)
            stream.push(lambda got=got: got.copy_(out))
        else:
            batch = model.batch([(1, 40 + step), (3, 30 + step)])
            inputs = model.inputs(batch, step)
            got = model.step(batch, inputs)
        results.append((got, model.want(batch, inputs)))
        stream.run_until(stream.done + done)
    stream.run_until(len(stream.queued))
    return all(torch.allclose(got.double(), want, rtol=2**-7, atol=2**-7) for got, want in results)


@settings(max_examples=settings.default.max_examples // 7)
@given(st.lists(st.integers(0, 40), min_size=2, max_size=8), st.integers(1, 3))
def test_steps_are_right_however_late_the_device_is(progress: list[int], graph_every: int) -> None:
    assert run_late(progress, graph_every)


def run_eager_late(lag: int) -> tuple[bool, int]:
    """Six steps from the very first, whose plans are made layer by layer, on a device that is `lag` steps behind.
    Whether all were right, and how often the host waited."""
    stream = Stream(late=True)
    model = Model(prepared(stream), KINDS)
    results, ends = [], [0] * lag
    for step in range(6):
        batch = model.batch([(1, 40 + 20 * step), (3, 30 + step)])
        inputs = model.inputs(batch, step)
        results.append((model.step(batch, inputs), model.want(batch, inputs)))
        ends.append(len(stream.queued))
        stream.run_until(ends[step])
    waits = stream.waits
    stream.run_until(len(stream.queued))
    return all(torch.allclose(got.double(), want, rtol=2**-7, atol=2**-7) for got, want in results), waits


def test_plans_made_late_in_a_step_are_waited_for_too() -> None:
    right, waits = run_eager_late(lag=5)
    assert right
    assert waits > 0


def test_the_host_never_waits_for_a_device_that_is_one_step_behind() -> None:
    assert run_eager_late(lag=1) == (True, 0)


@pytest.mark.parametrize("graph_every", [1, 100])
def test_without_waiting_for_its_set_a_late_device_computes_with_a_later_plan(
    monkeypatch: pytest.MonkeyPatch, graph_every: int
) -> None:
    """The proof that the test above sees the race."""
    assert run_late([0, 0, 0, 0], graph_every)
    monkeypatch.setattr(flashinfer_plans, "AlternatingSets", lambda sets, _: _Unguarded(list(sets)))
    assert not run_late([0, 0, 0, 0], graph_every)


class _Unguarded:
    def __init__(self, sets: list[int]) -> None:
        self._lease = Lease(sets[0], ImmediateEvent())

    def begin(self) -> Lease[int]:
        return self._lease


def test_a_kind_that_first_comes_by_in_a_capture_is_an_error() -> None:
    stream = Stream()
    model = Model(prepared(stream), KINDS[:1])
    metadata = model.backend.build_metadata(model.batch([], 4))
    q, out = torch.zeros(4, 4, 64).bfloat16(), torch.zeros(1, 4, 4, 64).bfloat16()
    with pytest.raises(RuntimeError, match="first time during a capture"):
        stream.capture(lambda: model.attend(q, out, metadata))


def test_block_tables_that_outgrow_a_graph_are_an_error() -> None:
    model = Model(prepared(), KINDS[:1])
    batch = model.batch([(1, 20)], 2)
    model.step(batch, model.inputs(batch, 0))
    wide = replace(model.batch([(1, 20), (1, 20)], 2), block_tables=torch.zeros(2, 200, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="this step has 400: block tables grew wider"):
        model.backend.build_metadata(replace(wide, seq_lens_host=[3200, 3200]))


def test_outputs_with_gaps_between_rows_are_filled_and_the_gaps_left() -> None:
    model = Model(prepared(), KINDS[:1])
    batch = model.batch(MIXED[:8])
    q = model.inputs(batch, 3)
    wide = torch.full((1, len(q), 8, 64), 7.0).bfloat16()
    model.attend(q, wide[:, :, 2:6], model.backend.build_metadata(batch))
    assert_close(wide[:, :, 2:6], model.want(batch, q))
    assert (wide[:, :, :2] == 7).all() and (wide[:, :, 6:] == 7).all()
