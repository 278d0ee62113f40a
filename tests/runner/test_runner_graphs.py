"""Padded steps that replay graphs equal unpadded ones, in every mode, while graphs are still being captured."""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fake_device import FakeCapturer as ArenaCapturer
from fake_graphs import CaptureSafeReference, FakeCapturer
from plan_driver import MIXER, NUM_BLOCKS, PlanDriver, tiny_runner
from test_runner_equals_dense import GREEDY, dense_greedy, dense_logits, sequences, start, tiny_decoder

from attention_backends.reference import ReferenceBackend
from compilation.graphs.dispatcher import Dispatch
from compilation.interface import CompileReport
from engine.config import CompileMode, GraphMode
from engine.errors import ConfigError
from engine.kv_cache.ledger import memory_ledger
from engine.runner import model_runner as room
from engine.runner.graphs import StepGraphs
from engine.runner.loading import graph_mode
from engine.runner.model_runner import ModelRunner
from engine.step import RowParams

MODES: list[tuple[CompileMode, GraphMode]] = [
    ("none", "none"),
    ("none", "full_decode"),
    ("pieces", "piecewise"),
    ("pieces", "both"),
]
ROUTES = {
    "none": {"eager"},
    "full_decode": {"eager", "full"},
    "piecewise": {"piecewise"},
    "both": {"piecewise", "full"},
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    cache_dir: Path
    runner: ModelRunner
    report: CompileReport
    seconds: float


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """A runner without graphs that compiled its pieces into an empty cache."""
    started = time.perf_counter()
    cache_dir = tmp_path_factory.mktemp("cache")
    runner = tiny_runner(cache_dir, "pieces")
    assert runner.warm_up().compiled == 0, "left to the job"
    job = runner.compile_job()
    assert job is not None
    job(threading.Event())()
    assert runner.compiled is not None
    return Compiled(cache_dir, runner, runner.compiled.report, time.perf_counter() - started)


@pytest.fixture
def cache(compiled: Compiled) -> Path:
    """Pieces are compiled once for all tests of this module."""
    return compiled.cache_dir


@pytest.fixture(autouse=True)
def no_time_for_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up captures no more than it must."""
    monkeypatch.setattr(room, "FIRST_CAPTURES_S", 0.0)


def graph_runner(cache: Path, compile_mode: CompileMode, graphs: GraphMode, **settings: object) -> ModelRunner:
    settings.setdefault("capturer", FakeCapturer())
    settings.setdefault("backend", CaptureSafeReference())
    return tiny_runner(cache, compile_mode, graphs=graphs, **settings)  # type: ignore[arg-type]


def watch_routes(runner: ModelRunner, seen: Counter[str]) -> None:
    dispatch = runner._dispatcher.dispatch

    def watched(num_tokens: int, uniform_decode: bool) -> Dispatch:
        chosen = dispatch(num_tokens, uniform_decode)
        seen[chosen.route] += 1
        return chosen

    runner._dispatcher.dispatch = watched  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(("compile_mode", "graphs"), MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_padded_steps_generate_the_dense_tokens_while_graphs_are_captured(
    cache: Path, compile_mode: CompileMode, graphs: GraphMode, seed: int
) -> None:
    rng = random.Random(seed)
    runner = graph_runner(cache, compile_mode, graphs)
    report = runner.warm_up()
    assert (report.graphs_pending > 0) == (report.graphs_captured > 0) == (graphs != "none")
    routes: Counter[str] = Counter()
    watch_routes(runner, routes)
    driver = PlanDriver(runner, rng, 0.05, lag=True)
    driver.before_step = lambda: rng.random() < 0.2 and runner.idle_work()
    work = sequences(rng, 9)
    driver.run(work)
    assert set(routes) == ROUTES[graphs]
    assert runner.compiles_after_ready() == 0
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["piecewise", "full_decode", "both"])
def test_graphs_that_share_one_arena_generate_the_dense_tokens(cache: Path, graphs: GraphMode) -> None:
    """Memory of the pool is given out again as soon as its owner is gone, and what is free is NaN at every replay: a
    step that reads what another graph has overwritten generates something else."""
    capturer, rng = ArenaCapturer(operations=False, pool_bytes=1 << 20), random.Random(4)
    runner = graph_runner(cache, "pieces", graphs, capturer=capturer)
    runner.warm_up()
    first_peak = capturer.memory_bytes()
    driver = PlanDriver(runner, rng, 0.05, lag=True)
    driver.before_step = lambda: rng.random() < 0.3 and runner.idle_work()
    work = sequences(rng, 9)
    driver.run(work)
    assert capturer.replays > 10 and capturer.pool.live == 0
    assert capturer.memory_bytes() == first_peak, "further sizes live in the first one's memory"
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)


@pytest.mark.slow
def test_compiled_pieces_generate_the_dense_tokens_and_compile_once(compiled: Compiled) -> None:
    report, rng = compiled.report, random.Random(3)
    assert report.compiled == report.distinct_pieces > 0 and report.loaded == 0
    assert 0 < report.seconds <= compiled.seconds
    work = sequences(rng, 6)
    PlanDriver(compiled.runner, rng, 0.1, True).run(work)
    assert compiled.runner.compiles_after_ready() == 0
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)


@pytest.mark.slow
def test_log_probabilities_do_not_see_the_padding(cache: Path) -> None:
    runner = graph_runner(cache, "pieces", "both")
    runner.warm_up()
    rng = random.Random(5)
    asked = sequences(rng, 3, RowParams(seed=0, temperature=0.0, logprobs=2, prompt_logprobs=1))
    PlanDriver(runner, rng, 0.0, True).run([*asked, *sequences(rng, 2)])
    model = tiny_decoder()
    for s in asked:
        tokens = s.prompt + s.generated
        expected = dense_logits(model, tokens).log_softmax(-1)
        entries = s.prompt_logprobs + s.logprobs
        assert len(entries) == len(tokens) - 1
        for position, entry in enumerate(entries):
            wanted = expected[position, entry.token_ids]
            torch.testing.assert_close(torch.tensor(entry.logprobs), wanted, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("compile_mode", "graphs"), MODES[1:])
def test_garbage_in_tails_and_in_blocks_of_nobody_reaches_no_real_row(
    cache: Path, compile_mode: CompileMode, graphs: GraphMode
) -> None:
    """Static buffers hold impossible values wherever a step does not write them, attention's output and everybody
    else's blocks hold NaN; what a graph computes in its padding is finite all the same."""
    rng = random.Random(12)
    runner = graph_runner(cache, compile_mode, graphs)
    runner.warm_up()
    while runner.idle_work():
        pass
    driver = PlanDriver(runner, rng, 0.0, lag=False)
    graph_set = runner._graphs
    assert graph_set is not None
    replay, padded = graph_set.replay, 0

    def poison() -> None:
        for field in dataclasses.fields(runner._batches.buffers):
            getattr(runner._batches.buffers, field.name).fill_(2**30)
        for kv_cache in runner._attention._kv_caches:
            kv_cache[driver.free_blocks] = torch.nan

    def checked(dispatch: Dispatch) -> torch.Tensor:
        nonlocal padded
        output = replay(dispatch)
        assert output.isfinite().all()
        padded += len(output) > sum(runner._attention._metadata[0].query_lens_host)  # type: ignore[attr-defined]
        return output

    driver.before_step = poison
    graph_set.replay = checked  # type: ignore[method-assign]
    work = sequences(rng, 7)
    driver.run(work)
    assert padded >= 2
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)


def test_attention_zeroes_the_tail_of_a_padded_step(tmp_path: Path) -> None:
    runner = graph_runner(tmp_path, "none", "full_decode")
    attention = runner._attention
    buffers = runner._batches.buffers
    runner.execute(start(runner, [1, 2, 3], [0])).wait()
    out = torch.full((8, MIXER.num_heads, MIXER.head_dim), torch.nan)
    q, k = torch.randn_like(out), torch.randn(8, MIXER.num_kv_heads, MIXER.head_dim)
    attention.attend(q, k, k, out, 0)
    assert out.isfinite().all() and out[:3].any() and not out[3:].any()
    attention.attend(q[:3], k[:3], k[:3], unpadded := torch.empty_like(out[:3]), 0)
    assert torch.equal(unpadded, out[:3])
    assert (buffers.slot_mapping[0, :3] >= 0).all()


@pytest.mark.parametrize("compile_mode", ["none", "pieces"])
@pytest.mark.parametrize("graphs", ["full_decode", "both"])
def test_a_full_graph_of_an_uncapturable_backend_is_refused(
    tmp_path: Path, compile_mode: CompileMode, graphs: GraphMode
) -> None:
    with pytest.raises(ConfigError, match=f"graphs='{graphs}'.*backend 'reference' is not capture-safe; use graphs="):
        graph_runner(tmp_path, compile_mode, graphs, backend=ReferenceBackend())


def test_whole_steps_of_layers_with_states_are_no_graphs() -> None:
    able: Any = SimpleNamespace(capabilities=lambda: SimpleNamespace(capture_safe=True))
    for keeps, modes in ((False, ("both", "full_decode")), (True, ("piecewise", "none"))):
        facts: Any = SimpleNamespace(states=keeps, family="hybrid")
        assert tuple(graph_mode("auto", compiled, able, facts) for compiled in ("pieces", "none")) == modes
    with pytest.raises(ConfigError, match="graphs='both' captures whole steps, but layers of hybrid keep states"):
        graph_mode("both", "pieces", able, facts)


def test_graphs_without_a_device_that_has_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="graphs='piecewise' needs device='cuda'"):
        tiny_runner(tmp_path, "pieces", graphs="piecewise")


@pytest.mark.parametrize(
    ("compile_mode", "capturable", "chosen"),
    [("pieces", True, "both"), ("pieces", False, "piecewise"), ("none", True, "full_decode"), ("none", False, "none")],
)
def test_auto_takes_all_that_backend_and_compile_mode_allow(
    tmp_path: Path, compile_mode: CompileMode, capturable: bool, chosen: str
) -> None:
    backend = CaptureSafeReference() if capturable else ReferenceBackend()
    runner = graph_runner(tmp_path, compile_mode, "auto", backend=backend)
    assert runner._dispatcher.mode == chosen
    assert (runner.report.graph_bytes > 0) == (chosen != "none")


def test_the_ledger_counts_what_graphs_will_take(tmp_path: Path) -> None:
    runner = graph_runner(tmp_path, "none", "full_decode")
    settings = runner._config
    without = msgspec.structs.replace(runner.report, graph_bytes=0)
    with_graphs, plain = (
        memory_ledger(load=load, cache=settings.cache, scheduler=settings.scheduler, device="cuda")
        for load in (runner.report, without)
    )
    assert with_graphs.graph_bytes == runner.report.graph_bytes > 0
    fewer = plain.num_blocks - with_graphs.num_blocks
    assert fewer in (runner.report.graph_bytes // plain.block_bytes + n for n in (0, 1))


def step_graphs(runner: ModelRunner) -> StepGraphs:
    runner.warm_up()
    assert runner._graphs is not None
    return runner._graphs


def test_start_up_captures_until_every_step_has_a_graph_and_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = step_graphs(graph_runner(tmp_path, "none", "full_decode"))
    assert (few.num_captured, few.num_pending) == (1, 2), "size 4 holds every decode of at most 4 rows"
    monkeypatch.setattr(room, "FIRST_CAPTURES_S", 60.0)
    capturer = FakeCapturer(bytes_per_session=700)
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)
    report = runner.warm_up()
    assert (report.graphs_captured, report.graphs_pending, report.graph_bytes) == (3, 0, 2100)
    assert not runner.idle_work() and capturer.captures == 3


def test_idle_work_captures_one_graph_a_turn(tmp_path: Path) -> None:
    capturer = FakeCapturer()
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)
    assert not runner.idle_work(), "nothing before warm-up"
    runner.warm_up()
    done = [(runner.idle_work(), capturer.captures) for _ in range(3)]
    assert done == [(True, 2), (False, 3), (False, 3)]


def test_ranks_have_the_same_graphs_which_are_captured_before_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    def others(mine: bool) -> bool:
        """Another rank has no room for a third one."""
        asked.append(mine)
        return mine and len(asked) < 3

    monkeypatch.setattr(room, "true_in_all", lambda group, device: others)
    with caplog.at_level(logging.WARNING):
        graphs = step_graphs(graph_runner(tmp_path, "none", "full_decode"))
    assert (graphs.num_captured, graphs.num_pending) == (2, 0) and asked == [True] * 3
    assert "another rank has not the" in caplog.text

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturer = FakeCapturer()
    capturer.before_capture = fail
    asked.clear()
    with pytest.raises(torch.OutOfMemoryError):  # other ranks are in the middle of the same capture
        step_graphs(graph_runner(tmp_path, "none", "full_decode", capturer=capturer))


def test_capture_stops_before_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capturer = FakeCapturer(bytes_per_session=100 << 20)
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)
    monkeypatch.setattr(room, "device_memory", lambda device: (1 << 30, (450 << 20) - capturer.taken_bytes))
    runner.warm_up()
    assert runner.idle_work(), "350 MiB are free, nothing is known to be needed beside the reserve of 256"
    with caplog.at_level(logging.WARNING):
        assert not runner.idle_work()
    assert "250 MiB of device memory are free, 356 MiB are needed" in caplog.text
    assert capturer.captures == 2 and not runner.idle_work()
    assert runner.execute(start(runner, [9, 8, 7], [0])).wait().token_ids == dense_greedy([9, 8, 7], 1)


def test_running_out_of_memory_in_a_capture_ends_capturing_not_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    capturer = FakeCapturer()
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    capturer.before_capture = fail
    with caplog.at_level(logging.WARNING):
        report = runner.warm_up()
    assert (report.graphs_captured, report.graphs_pending) == (0, 0) and "CUDA out of memory" in caplog.text
    assert runner.execute(start(runner, [9, 8, 7], [0])).wait().token_ids == dense_greedy([9, 8, 7], 1)


def test_a_failing_capture_fails_start_up_but_not_serving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    capturer = FakeCapturer()
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)
    capturer.before_capture = fail
    with pytest.raises(RuntimeError, match="not permitted"):
        runner.warm_up()
    capturer = FakeCapturer()
    runner = graph_runner(tmp_path, "none", "full_decode", capturer=capturer)
    runner.warm_up()
    capturer.before_capture = fail
    with caplog.at_level(logging.WARNING):
        assert not runner.idle_work()
    assert "not permitted" in caplog.text
    work = sequences(random.Random(2), 5)
    PlanDriver(runner, random.Random(2), 0.0, True).run(work)
    assert all(s.generated == dense_greedy(s.prompt, s.num_tokens) for s in work)


def test_capture_leaves_the_cache_as_it_was(tmp_path: Path) -> None:
    runner = graph_runner(tmp_path, "none", "full_decode")
    runner.warm_up()
    for kv_cache in runner._attention._kv_caches:
        kv_cache.copy_(torch.randn(kv_cache.shape))
    before = [kv_cache.clone() for kv_cache in runner._attention._kv_caches]
    while runner.idle_work():
        pass
    assert len(before[0]) == NUM_BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(before, runner._attention._kv_caches))


def test_rows_that_draw_get_the_same_tokens_from_graphs(tmp_path: Path) -> None:
    params = RowParams(seed=11, temperature=1.3, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3)
    outcomes = []
    for graphs in ("none", "full_decode"):
        runner = graph_runner(tmp_path, "none", graphs)
        runner.warm_up()
        work = [*sequences(random.Random(7), 5, params), *sequences(random.Random(8), 2, GREEDY)]
        PlanDriver(runner, random.Random(3), 0.0, True).run(work)
        outcomes.append([s.generated for s in work])
    assert outcomes[0] == outcomes[1]
