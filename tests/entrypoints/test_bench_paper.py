"""`engine-bench paper`: length fits, the buddy allocator, reservations, the virtual clock, and what is written."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import save_model

from engine.config import EngineArgs, Preemption, SchedulerConfig
from engine.core.wire import AddRequest
from engine.scheduling.scheduler import Scheduler
from engine.step import RowParams, StepResult
from entrypoints.bench.cli import main
from entrypoints.bench.paper import fig_real
from entrypoints.bench.paper.buddy import BuddyAllocator, chunk_size
from entrypoints.bench.paper.candidates import turnover
from entrypoints.bench.paper.cost import OPT_13B, Server, StepCost
from entrypoints.bench.paper.device import LENGTHS, Device, calibrate, english
from entrypoints.bench.paper.figure import QUICK, Published, Study, verdict
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT, LengthFit
from entrypoints.bench.paper.reservation import ReservingKVCache, reserve_max, reserve_oracle, reserve_pow2
from entrypoints.bench.paper.saturated import saturated
from entrypoints.bench.paper.simulate import Outcome, Simulation
from entrypoints.bench.paper.static_batches import batch_seconds, run_static
from entrypoints.bench.paper.sustained import search
from entrypoints.bench.paper.systems import ORCA, OURS, STATIC, Setup
from entrypoints.bench.paper.traces import Job, Workload, chat, plain, with_prefix


@pytest.mark.parametrize(
    ("fit", "mean"),
    [(SHAREGPT.prompt, 161.31), (SHAREGPT.output, 337.99), (ALPACA.prompt, 19.31), (ALPACA.output, 58.45)],
)
def test_lengths_have_the_published_means(fit: LengthFit, mean: float) -> None:
    assert fit.mean_at(fit.mu) == pytest.approx(mean, rel=1e-6)
    drawn = fit.draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.01)
    assert drawn.min() >= 1 and drawn.max() <= fit.longest


@given(st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=60))
@settings(deadline=None)
def test_the_buddy_allocator_equals_a_search_over_all_aligned_chunks(size: int, calls: list[tuple[bool, int]]) -> None:
    """Brute force: a chunk may lie at any multiple of its size inside a root, if no unit of it is in use. Whenever one
    such place is free the allocator must find a place (merging), and never one in use (no overlap)."""
    buddy = BuddyAllocator(size)
    used = [False] * size
    held: dict[int, int] = {}
    for frees, number in calls:
        if frees and held:
            start = sorted(held)[number % len(held)]
            chunk = held.pop(start)
            used[start : start + chunk] = [False] * chunk
            buddy.free(start)
        elif not frees:
            chunk = chunk_size(number)
            places = [at for at in range(0, size - chunk + 1, chunk) if _in_one_root(size, at, chunk)]
            free = [at for at in places if not any(used[at : at + chunk])]
            assert buddy.fits(number) == bool(free)
            start_or_none = buddy.allocate(number)
            assert (start_or_none in free) if free else (start_or_none is None)
            if start_or_none is not None:
                used[start_or_none : start_or_none + chunk] = [True] * chunk
                held[start_or_none] = chunk
        assert buddy.num_free == used.count(False)


def _in_one_root(size: int, at: int, chunk: int) -> bool:
    start = 0
    for order in reversed(range(size.bit_length())):
        if size >> order & 1:
            if start <= at and at + chunk <= start + (1 << order):
                return True
            start += 1 << order
    return False


def test_policies_reserve_what_the_paper_says() -> None:
    assert reserve_pow2(100, 25, 2048) == 100 + 32
    assert reserve_pow2(100, 32, 2048) == 100 + 32
    assert reserve_pow2(1024, 1000, 2048) == 2048
    assert reserve_oracle(100, 25, 2048) == 125
    assert reserve_max(100, 25, 2048) == 2048


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=24), st.sampled_from(ORCA))
def test_reserved_chunks_never_overlap_and_all_memory_comes_back(shapes: list[tuple[int, int]], system: str) -> None:
    server = replace(OPT_13B, max_model_len=64)
    setup = Setup(system, server, block_size=4)
    kv = ReservingKVCache(37, 4)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, max_model_len=64, max_waiting=100)
    scheduler = Scheduler(config, kv)
    for index, (prompt, output) in enumerate(shapes):
        job = Job(0.0, [1] * prompt, output)
        kv.expect(*setup.reservation(job))
        params = RowParams(seed=0)
        scheduler.add(AddRequest(request_id=str(index), prompt_token_ids=job.prompt, params=params, max_tokens=output))
    tables: dict[int, list[int]] = {}
    generated = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None, "work is left and nothing was planned"
        for row in plan.released:
            del tables[row]
        for append in plan.block_appends.each():
            assert append.values == list(range(append.values[0], append.values[-1] + 1)), "not contiguous"
            tables[append.row] = append.values
        blocks = [block for table in tables.values() for block in table]
        assert len(set(blocks)) == len(blocks) and all(block < 37 for block in blocks)
        tokens = [7] * int(plan.rows.samples.sum())
        generated += len(tokens)
        scheduler.complete(StepResult(step_id=plan.step_id, token_ids=tokens))
    assert generated == sum(output for _, output in shapes)
    assert scheduler.stats().preemptions == 0, "what is reserved is never taken back"
    assert kv.pool.num_free == 37 and kv.held.final == kv.held.policy == 0


_TOY = Server(
    name="toy",
    gpus="one",
    num_gpus=1,
    parameters=0.0,
    layers=1,
    hidden=1,
    bandwidth=1.0,
    flops=1.0,
    kv_memory=64 * 4,
    max_model_len=32,
    host_s=1.0,
    host_per_row_s=0.0,
)
"""64 slots; but for the KV that they read, all steps take a second"""


class _FlatCost(StepCost):
    def of(self, rows: int, tokens: int, context: float) -> float:
        return 1.0 + 0.5 * rows


def test_the_virtual_clock_adds_up_to_what_a_hand_computes() -> None:
    """Two requests of 4 prompt tokens: A at 0 with 3 outputs, B at 0.5 with 2. Step 1 (A alone) ends at 1.5, step 2 (A
    and B) at 3.5 and step 3 (A ends, B ends) at 5.5."""
    workload = plain(ALPACA)
    jobs = [Job(0.0, [1] * 4, 3), Job(0.5, [1] * 4, 2)]
    run = Simulation(Setup(OURS, _TOY, block_size=4), workload, jobs)
    run.cost = _FlatCost(_TOY)
    outcome = run.run()
    assert outcome.makespan_s == pytest.approx(5.5)
    assert outcome.normalised_latency_s == pytest.approx((5.5 / 3 + 5.0 / 2) / 2)
    assert outcome.steps == 3 and not outcome.gave_up
    assert outcome.meter.seconds == pytest.approx(1.5), "metered while requests are to come or wait"
    assert outcome.batched == pytest.approx(1.0) and outcome.token_share == pytest.approx(4 / 64)


class _SecondCost(StepCost):
    def of(self, rows: int, tokens: int, context: float) -> float:
        return 1.0


def _pressed(preemption: Preemption, server: Server = _TOY) -> tuple[Simulation, Outcome]:
    """Four requests that need 8 blocks each in the end, in a pool of 16."""
    jobs = [Job(0.0, [1] * 8, 24) for _ in range(4)]
    run = Simulation(Setup(OURS, server, block_size=4, preemption=preemption), plain(ALPACA), jobs)
    run.cost = _SecondCost(server, block_size=4)
    return run, run.run()


def test_the_virtual_clock_is_charged_for_every_block_that_is_swapped() -> None:
    run, swap = _pressed("swap")
    assert swap.swapped == swap.preemptions > 0
    assert swap.makespan_s - swap.steps == pytest.approx(run.cost.swap(swap.blocks_moved), rel=1e-6)
    assert run.scheduler.stats().generated_tokens == 4 * 24
    assert run.kv.host is not None and run.kv.host.pool.num_used == 0
    _, recompute = _pressed("recompute")
    assert recompute.preemptions > 0 and recompute.swapped == recompute.blocks_moved == 0
    assert recompute.makespan_s == recompute.steps


def test_auto_swaps_only_over_a_link_that_is_fast() -> None:
    """A token of a prompt takes a sixteenth of a second or more; so much KV takes over a second a block."""
    assert _pressed("auto")[1].swapped > 0
    heavy = replace(_TOY, hidden=10**9, kv_memory=64 * 4e9)
    slow = _pressed("auto", heavy)[1]
    assert slow.preemptions > 0 and slow.swapped == 0


def test_a_run_is_given_up_only_when_its_mean_is_certain_to_be_above_the_bound() -> None:
    workload = plain(ALPACA)
    jobs = workload.jobs(40.0, 10.0, seed=3)
    exact = Simulation(Setup("Orca (Max)", OPT_13B), workload, jobs).run()
    early = Simulation(Setup("Orca (Max)", OPT_13B), workload, jobs, give_up_above=0.2).run()
    assert early.gave_up and early.steps < exact.steps
    assert 0.2 < early.normalised_latency_s <= exact.normalised_latency_s


def test_blocks_saved_are_those_that_a_count_over_the_tables_finds() -> None:
    """Two samples of 9 prompt tokens in blocks of 4: 2 full blocks are shared, the third is copied on write."""
    workload = plain(ALPACA, samples=2)
    run = Simulation(Setup(OURS, _TOY, block_size=4), workload, [Job(0.0, [1] * 9, 2), Job(1e6, [1], 1)])
    outcome = run.run()
    # Step 1, both rows hold the same 3 blocks; step 2, two of 3 are shared. Both take as long but for the KV read.
    first, second = (run.cost.of(2, 9, 18), run.cost.of(2, 2, 20) + 4 * run.cost.seconds_per_copied_token)
    assert outcome.saved == pytest.approx(1 - (3 * first + 4 * second) / (6 * (first + second)))


def test_static_batches_take_the_sum_of_their_steps() -> None:
    cost = StepCost(OPT_13B, paged=False)
    batch = [Job(0.0, [1] * 30, 5), Job(0.0, [1] * 20, 3)]
    by_step = cost.of(2, 60, 60) + sum(cost.of(2, 2, 2 * (30 + step)) for step in range(1, 5))
    assert batch_seconds(cost, batch) == pytest.approx(by_step)
    outcome = run_static(Setup(STATIC, OPT_13B), batch)
    assert outcome.normalised_latency_s == pytest.approx((by_step / 5 + by_step / 3) / 2)


def test_small_blocks_and_pages_cost_more_to_read() -> None:
    by_size = [StepCost(OPT_13B, size).seconds_per_context_token for size in (1, 4, 16, 64)]
    assert by_size == sorted(by_size, reverse=True)
    assert by_size[2] == pytest.approx(1.23 * StepCost(OPT_13B, paged=False).seconds_per_context_token)


def test_a_prefix_that_is_read_once_costs_one_row_its_reading() -> None:
    cost = replace(StepCost(OPT_13B), read_once=100)
    reading = StepCost(OPT_13B).of(3, 3, 3 * 140) - StepCost(OPT_13B).of(3, 3, 100 + 3 * 40)
    assert StepCost(OPT_13B).of(3, 3, 3 * 140) - cost.of(3, 3, 3 * 140) == pytest.approx(reading)
    assert cost.of(1, 1, 140) == pytest.approx(StepCost(OPT_13B).of(1, 1, 140))


def test_steps_under_load_hold_what_memory_holds() -> None:
    """Seven chunks of 2,048 tokens fit OPT-13B's slots, so Max has seven requests in every step while others wait."""
    study = Study(QUICK, 0, lambda text: None)
    found = saturated(study, Setup(ORCA[0], OPT_13B), plain(SHAREGPT))
    assert found.batched == pytest.approx(7, abs=0.3)
    assert found.tokens_per_s == pytest.approx(found.batched / found.step_s)
    assert 0 < found.reading_s < found.step_s


@pytest.mark.parametrize("guess", [0.5, 2.0, 9.0])
def test_the_search_brackets_the_rate_at_which_the_bound_is_crossed(guess: float) -> None:
    found = search(lambda rate: rate / 10, guess=guess, tolerance=0.01, bound=0.3)
    assert 3.0 / 1.01 <= found.sustained <= 3.0
    assert [point.rate for point in found.points] == sorted(point.rate for point in found.points)


def test_a_system_that_sustains_nothing_is_told_so() -> None:
    assert search(lambda rate: 1.0, guess=1.0, tolerance=0.1, bound=0.3).sustained == 0.0


def test_beams_that_share_less_are_those_of_a_surer_model() -> None:
    assert turnover(4, spread=0.05) < turnover(4, spread=1.0) < 0.75


def test_traces_differ_in_their_arrivals_alone() -> None:
    workload = plain(SHAREGPT)
    slow, fast = workload.jobs(1.0, 100, seed=5), workload.jobs(2.0, 50, seed=5)
    assert [(len(job.prompt), job.output) for job in slow] == [(len(job.prompt), job.output) for job in fast]
    assert [job.arrival_s for job in slow] == pytest.approx([2 * job.arrival_s for job in fast])


@pytest.mark.parametrize("workload", [with_prefix(ALPACA, 40), chat(SHAREGPT, 3.0)])
def test_prompts_share_their_prefix_and_histories_are_cut(workload: Workload) -> None:
    prompts = [job.prompt for job in workload.backlog(50, seed=0)]
    if "prefix" in workload.name:
        assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
        assert len({tuple(prompt[:60]) for prompt in prompts}) > 40
    else:
        assert max(map(len, prompts)) == 1024 and min(map(len, prompts)) < 1024


def test_a_figure_is_as_the_paper_only_within_its_range() -> None:
    paper = Published(6.1, 9.8, " %")
    assert verdict(7.0, paper) == "as the paper"
    assert verdict(10.0, paper, 0.5) == "within 0.5 %"
    assert verdict(10.0, paper) == "above" and verdict(5.0, paper) == "below"


@pytest.mark.slow
def test_a_quick_run_writes_all_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """By default without those that look for sustained rates of many systems; one of that kind is among the others."""
    plots = importlib.util.find_spec("matplotlib") is not None
    figures = [*("2", "12", "13", "14", "15", "16", "17", "18b", "19")]
    if not pytestconfig.getoption("exhaustive"):
        figures = ["2", "15", "18b"]
    options = ["paper", "--quick", "--figures", ",".join(figures), "--out", str(tmp_path / "out"), "--no-progress"]
    assert main(options if plots else [*options, "--no-plots"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    keys = printed["results"][0]["figures"]
    assert keys == ["fig02" if figure == "2" else f"fig{figure}" for figure in figures]
    text = (tmp_path / "out" / "paper.md").read_text()
    data = json.loads((tmp_path / "out" / "paper.json").read_text())
    assert list(data["figures"]) == keys
    assert data["figures"]["fig02"]["ours"]["token states"] > 90
    for figure in figures:
        assert f"## Fig. {figure}:" in text
    assert text.count("Where the paper's values are from.") == len(keys)
    written = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert written == ({f"paper_{key}.png" for key in keys} if plots else set())


def test_plots_without_matplotlib_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(SystemExit):
        main(["paper", "--out", str(tmp_path / "out")])
    assert "pageloom[bench]" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_real_model_runs_under_a_policy_as_the_simulator_says(tmp_path: Path) -> None:
    """The device follows what is reserved: all requests end, in the simulated number of steps."""
    model = save_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    args = EngineArgs(
        model=str(model),
        load_format="dummy",
        compile="none",
        device="cpu",
        dtype="float32",
    )
    device = Device(args)
    try:
        bench = fig_real.Bench(device, english(device), Study(QUICK, 0, lambda text: None))
        jobs = bench.jobs(10)
        peaks = {}
        for system in (ORCA[0], OURS):
            real = bench.run(system, plain(LENGTHS), jobs)
            simulated = Simulation(bench.setup(system), plain(LENGTHS), jobs).run()
            assert real.steps == simulated.steps
            peaks[system] = max(step.rows for step in device.steps[-real.steps :])
        assert peaks == {"Orca (Max)": 7, OURS: 10}, "7 chunks of the longest sequence fit the pool"
        fitted = calibrate(device.server, device.steps)
        assert all(weight >= 0 for weight in fitted.weights) and fitted.of(4, 4, 100) > 0
        workload = plain(LENGTHS, 2, beams=True)
        assert bench.run(OURS, workload, [*jobs[:2], Job(1e9, [1], 1)]).saved > 0.05
    finally:
        device.close()
